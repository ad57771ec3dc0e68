"""Finds the reason why an FP32 model is no reference for a half: it draws numbers, rounds to whole steps inside, or
answers far otherwise when it adds up in another order."""

import re
from collections.abc import Iterable, Sequence

from ...models.spec.spec import UNIT_ROUNDOFF
from ..gate.curve import divergence_curve
from ..graph.original_graph import OriginalGraph
from ..question import Answers, Question
from .prove import SAME_IN_FP32, ReferenceRun, gap

Operation = tuple[str, str]  # the name of a node, and what it does
DRAWS = re.compile(
    "RandomNormal|RandomNormalLike|RandomUniform|RandomUniformLike|Multinomial|Bernoulli|"
    "(rand|randn|randint|randperm)(_like)?|bernoulli|multinomial|normal|uniform|poisson|exponential|"
    "rrelu_with_noise|native_dropout|Dropout in training"
)
TRAINS = re.compile("BatchNormalization in training")
ROUNDS = re.compile("QuantizeLinear|DynamicQuantizeLinear|(fake_)?quantize_per_(tensor|channel).*")
_NAMED = 3
UNSTABLE_U = 64.0
ACCEPT = "accept"  # the one value of `ParityLimits.unstable`
_DRAWN = (
    ", and no half can be held against that; make what is drawn an input, or export the model in evaluation"
)


def why_it_does_not_repeat(run: ReferenceRun, original: Answers, operations: Iterable[Operation]) -> str:
    """A reason where the model answers the same input otherwise each time; empty where it does not.

    One question shows a model that keeps values. Where nodes draw numbers all questions are asked again: a mask that is
    drawn may seldom change anything.
    """
    drawn = why_drawn(operations := list(operations))
    asked = [*run.small, *run.bulk]
    changed = next(filter(None, (_changed(one, original) for one in (asked if drawn else asked[:1]))), "")
    if not changed:
        return ""
    if trains := named(operations, TRAINS):
        cause = f"{trains} computes with the mean of the batch and keeps it; export the model in evaluation"
    else:
        cause = drawn or f"it draws random numbers, or keeps values from run to run{_DRAWN}"
    return f"the FP32 model answers the same input otherwise each time (output '{changed}'): {cause}"


def _changed(asked: Question, original: Answers) -> str:
    """The first output that the model answers otherwise when it is asked again; empty where there is none."""
    again = original(asked.inputs)
    differs = (name for name, array in asked.reference.items() if not gap(array, again[name]) <= SAME_IN_FP32)
    return next(differs, "")


def why_unstable(
    run: ReferenceRun, dtype: str, original: OriginalGraph | None, operations: Sequence[Operation]
) -> str:
    """A reason where FP32's own noise in an output is so large (`UNSTABLE_U`) that nothing of a half can be promised,
    unless the model's folder accepts it; empty otherwise."""
    u = UNIT_ROUNDOFF[dtype]
    noises = {name: noise.numbers["error"] / u for name, noise in run.noise.items()}
    name = max(noises, key=noises.__getitem__, default="")
    if run.spec.parity.unstable == ACCEPT or not name or noises[name] <= UNSTABLE_U:
        return ""
    cause = cause_of_noise(run, u, original, operations, "have it computed more stably there")
    return (
        f"the FP32 model is no reference for output '{name}': it answers the same samples differently by "
        f"{noises[name]:.3g}u when it is evaluated in FP64 or adds up in another order, and above {UNSTABLE_U:g}u "
        f'nothing is promised of a half: {cause}, or accept it by setting unstable = "{ACCEPT}" under [parity]'
    )


def cause_of_noise(
    run: ReferenceRun, u: float, original: OriginalGraph | None, operations: Sequence[Operation], advice: str
) -> str:
    """The cause of different answers of the FP32 model when it is evaluated another way. ``advice``: for a model in
    which nothing is drawn or rounded to steps."""
    return (
        why_drawn(operations) or why_steps(operations) or f"{where_noise_is_born(run, original, u)}{advice}"
    )


def where_noise_is_born(run: ReferenceRun, original: OriginalGraph | None, u: float) -> str:
    """The node at which FP32's noise grows beyond what its inputs have; empty where no node does so alone."""
    if original is None:
        return ""
    asked = run.bulk[0].first(1).inputs if run.spec.batched else run.bulk[0].inputs
    curve = divergence_curve(
        original.nodes(),
        lambda tap: original.as_served(tap)(asked),
        lambda tap: original.otherwise(tap)(asked),
        u,
    )
    return f"the noise is born at node '{curve.first.node}' ({curve.first.op}); " if curve.first else ""


def why_drawn(operations: Iterable[Operation]) -> str:
    """A reason by nodes that draw random numbers; empty where there are none."""
    found = named(operations, DRAWS)
    return f"random numbers are drawn by {found}{_DRAWN}" if found else ""


def why_steps(operations: Iterable[Operation]) -> str:
    """A reason by nodes that round to whole steps; empty where there are none."""
    found = named(operations, ROUNDS)
    return (
        f"numbers are rounded to whole steps inside the model by {found}: one near the border of two steps gets "
        "another step when it is computed another way, in FP32 as in half; convert the model before it was quantized, "
        "or serve it in FP32"
        if found
        else ""
    )


def named(operations: Iterable[Operation], kinds: re.Pattern[str]) -> str:
    """The nodes whose operation is one of ``kinds``, at most three of them by name; empty where there are none."""
    found = [f"'{name}' ({kind})" for name, kind in operations if kinds.fullmatch(kind)]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"node{'s' * (len(found) > 1)} {', '.join(found[:_NAMED])}{more}" if found else ""
