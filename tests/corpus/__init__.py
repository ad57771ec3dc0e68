"""The corpus: models that a conversion must get right or honestly refuse.

``CORPUS[name]`` is a `Case`; ``captured(name)`` its original program; ``fresh(name, rows, seed)`` new inputs.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.kept import kept_program
from tests.programs import Original, described, exported
from tests.slow import drawn, slow_but

from . import integers, layers, masks, overflow, precision, ranking, structure, underflow, zoo
from .case import Case

__all__ = ["CORPUS", "FAMILIES", "Case", "built", "captured", "cases", "fresh"]

FAMILIES = (overflow, underflow, precision, masks, structure, integers, layers, ranking, zoo)
CORPUS: dict[str, Case] = {name: case for family in FAMILIES for name, case in family.CASES.items()}
# One trap of a family, one that only looks wrong, one that is refused, and healthy nets: those that convert soonest.
EVERY_RUN = {
    "rms norm of large", "harmless overflow", "tiny product", "sigmoid tail", "mean of squares", "masked pooling",
    "sinusoidal table", "shared block", "float island", "while loop", "hashed ids", "argmax", "residual", "lstm",
    "cosine head", "zoo mlp", "zoo recommender",
}  # fmt: skip


def of_a_run() -> Sequence[str]:
    """One model in eight, as the run's seed draws them."""
    return drawn(8, sorted(CORPUS, key=EVERY_RUN.__contains__))


def cases(names: Iterable[str], fast: Collection[str] = frozenset(EVERY_RUN)) -> list[Any]:
    """The names for ``pytest.mark.parametrize``: all but `EVERY_RUN`, or ``fast``, are slow.

    A run has one in eight of the others, and all sweeps have the same ones: what a model needs is made once for all.
    """
    some = {*EVERY_RUN, *of_a_run()}
    return slow_but(fast, [name for name in names if name in some])


def built(name: str) -> nn.Module:
    """The module in evaluation, the same at every call; nobody else's random numbers change."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CORPUS[name].build().eval().requires_grad_(False)


@cache
def captured(name: str) -> Original:
    """The model as a captured program; the kinds of its outputs are in the spec."""
    case = CORPUS[name]
    inputs = fresh(name, 8, seed=0)
    program = kept_program(name, lambda: exported(built(name), inputs, case.free, case.max_batch_size))
    found = described(program, inputs, case.free, case.max_batch_size)
    kinds = case.kinds or ("tensor",) * len(found.spec.outputs)
    outputs = zip(found.spec.outputs, kinds, strict=True)
    spec = replace(
        found.spec,
        name=name.replace(" ", "-"),
        outputs=tuple(replace(output, kind=kind) for output, kind in outputs),
    )
    return replace(found, spec=spec)


def fresh(name: str, rows: int, seed: int) -> dict[str, Tensor]:
    """``rows`` new inputs, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CORPUS[name].inputs(rows)
