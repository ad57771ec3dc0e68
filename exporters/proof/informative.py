"""Finds out whether the judged samples can prove a half. They cannot if the FP32 model's outputs for all of them are
empty or zero, or if the half passes only because FP32's own noise is as large as the half's error."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...models.spec.datatypes import DATATYPES
from ...models.spec.spec import UNIT_ROUNDOFF, ParityLimits, TensorSpec
from ..gate.divergence import FAINT_U, SENTINEL
from ..gate.parity import SENTINEL_LANDS
from ..gate.verdict import ParityReport
from ..question import Arrays
from .prove import ReferenceRun

MOST_OF_MASKS = 16  # different values, each to two digits
_GIVE = "give samples that it has answers to"


def why_nothing_is_proven(run: ReferenceRun) -> str:
    """A reason where every answer in floating point is 0 or not finite, or where all answers of one output have no
    elements or are so large that the gate compares none, and where those that it does not compare vary; empty
    otherwise.

    Any half that also answers 0 would pass: a mask that generated lengths leave empty, a score below its threshold. So
    would one that finds nothing where a detector finds nothing, and one that overflows where the gate compares signs
    alone.
    """
    asked = [*run.small, *run.bulk, *run.perturbed]
    return why_answers_show_nothing(run.spec.outputs, [question.reference for question in asked])


def why_answers_show_nothing(outputs: Sequence[TensorSpec], asked: Sequence[Arrays]) -> str:
    """A reason as that of `why_nothing_is_proven`; ``asked``: the FP32 model's answers, by the names of its outputs."""
    names = [tensor.name for tensor in outputs if tensor.type.is_float]
    every = [tensor.name for tensor in outputs] if asked else []
    if empty := [name for name in every if not any(answers[name].size for answers in asked)]:
        return (
            f"the FP32 model finds nothing in any judged sample ({_listed(empty)} without elements), which proves "
            f"nothing of a half; {_GIVE}"
        )
    if huge := [name for name in names if _only_sentinels(answers[name] for answers in asked)]:
        return (
            f"to every judged sample the FP32 model answers numbers of {SENTINEL:.0e} or more ({_listed(huge)}), which "
            "count as the values of a mask and are not compared, so nothing is proven of a half; answer in another "
            f"unit, or {_GIVE}"
        )
    if varied := [name for name in names if _varied_sentinels(answers[name] for answers in asked)]:
        return (
            f"the FP32 model answers many different numbers of {SENTINEL:.0e} or more ({_listed(varied)}), and such "
            "numbers count as the values of a mask and are not compared, so nothing is proven of a half; let the model "
            "answer in a larger unit"
        )
    if small := [name for name in names if _beside_a_fill(answers[name] for answers in asked)]:
        return (
            f"the FP32 model fills masked places with a number beside which all others are no larger than the error "
            f"that each of them may have ({_listed(small)}), so nothing is proven of a half; fill them with "
            f"{-SENTINEL:.0e} or less, which counts as the value of a mask"
        )
    informative = any(
        (np.isfinite(answers[name]) & (answers[name] != 0)).any() for answers in asked for name in names
    )
    if informative or not names or not asked:
        return ""
    return (
        f"to every judged sample the FP32 model answers 0 or a number that is not finite ({_listed(names)}), which "
        f"proves nothing of a half; {_GIVE}"
    )


def note_of_sentinels(run: ReferenceRun) -> str:
    """A sentence about outputs with numbers that the gate takes for the values of a mask; empty where none has any."""
    asked = [*run.small, *run.bulk]
    names = [
        tensor.name
        for tensor in run.spec.outputs
        if tensor.type.is_float and any(_has_sentinels(one.reference[tensor.name]) for one in asked)
    ]
    if not names:
        return ""
    return (
        f"numbers of {SENTINEL:.0e} or more in {_listed(names)} are taken for the values of a mask: a half may give "
        "other large numbers of the same sign for them, and their error is not judged; test for them by their size"
    )


def _has_sentinels(array: np.ndarray) -> bool:
    return bool((np.isfinite(array) & (np.abs(array.astype(np.float64)) >= SENTINEL)).any())


def _only_sentinels(answers: Iterable[np.ndarray]) -> bool:
    """True if these arrays have finite numbers, and every one of them is so large (`SENTINEL`) that the gate compares
    only its sign."""
    # Half has no SENTINEL.
    sizes = [np.abs(answer[np.isfinite(answer)].astype(np.float64)) for answer in answers]
    return any(size.size for size in sizes) and all((size >= SENTINEL).all() for size in sizes)


def _varied_sentinels(answers: Iterable[np.ndarray]) -> bool:
    """True if the numbers that the gate does not compare are too many different ones for the values of a mask, to which
    scores and other masks were added: an energy, a count of operations."""
    seen = set[float]()
    for answer in answers:
        large = answer[np.isfinite(answer) & (np.abs(answer.astype(np.float64)) >= SENTINEL)]
        seen |= different(large)
    return len(seen) > MOST_OF_MASKS


def _beside_a_fill(answers: Iterable[np.ndarray]) -> bool:
    """True if these arrays repeat one large negative number, which the gate compares, and hold nothing else but numbers
    that may be lost beside it in a half."""
    arrays = [*answers]
    fill = min((float(_compared(one).min(initial=0.0)) for one in arrays), default=0.0)
    if fill > -SENTINEL_LANDS:
        return False
    repeats = sum(int((one == fill).sum()) for one in arrays)
    others = max(float(np.abs(rest[rest != fill]).max(initial=0.0)) for rest in map(_compared, arrays))
    return repeats > 1 and 0.0 < others <= FAINT_U * UNIT_ROUNDOFF["bf16"] * -fill


def _compared(array: np.ndarray) -> np.ndarray:
    wide = array.astype(np.float64)
    return wide[np.abs(wide) < SENTINEL]


def different(numbers: np.ndarray) -> set[float]:
    """The different numbers of an array, each to two digits."""
    fractions, exponents = np.frexp(numbers.astype(np.float64))
    return {*np.unique(np.ldexp(np.round(fractions, 2), exponents)).tolist()}


def why_noise_proves_nothing(
    reports: Iterable[ParityReport], limits: ParityLimits, cause: Callable[[str], str] = str
) -> str:
    """A reason where every output in floating point errs by more than ``limits`` and passes all the same, in each of
    these reports; empty otherwise. ``cause`` takes advice, and gives the cause of the noise with it.

    No limit is narrower than FP32's own noise (`gate/noise.py`). A map of scores of which generated pictures leave
    4e-6 is such noise and nothing else.
    """
    names = list[str]()
    for report in reports:
        outputs = [output for output in report.outputs if DATATYPES[output.datatype].is_float]
        if not (report.passed and outputs and all(one.max_error_u > limits.max_error_u for one in outputs)):
            return ""
        names = [output.name for output in outputs]
    if not names:
        return ""
    return (
        "the half errs by more than is allowed, and passes only because the FP32 model itself answers the judged "
        f"samples as differently when it is evaluated another way ({_listed(names)}), which proves nothing of a half; "
        f"{cause(_GIVE)}"
    )


def _listed(names: list[str]) -> str:
    return f"output{'s' * (len(names) > 1)} " + ", ".join(f"'{name}'" for name in names)
