"""The corpus: models that a conversion must get right or honestly refuse.

``CORPUS[name]`` is a `Case`; ``captured(name)`` its whole program; ``fresh(name, rows, seed)`` new inputs.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from tests.programs import Whole, whole

from . import integers, layers, masks, overflow, precision, ranking, structure, underflow, zoo
from .case import Case

__all__ = ["CORPUS", "FAMILIES", "Case", "built", "captured", "fresh"]

FAMILIES = (overflow, underflow, precision, masks, structure, integers, layers, ranking, zoo)
CORPUS: dict[str, Case] = {name: case for family in FAMILIES for name, case in family.CASES.items()}


def built(name: str) -> nn.Module:
    """The module in evaluation, the same at every call; nobody else's random numbers change."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CORPUS[name].build().eval().requires_grad_(False)


@cache
def captured(name: str) -> Whole:
    """The model as a whole program; the kinds of its outputs are in the spec."""
    case = CORPUS[name]
    found = whole(built(name), fresh(name, 8, seed=0), case.free, case.max_batch_size)
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
