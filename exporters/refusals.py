"""The sentences of a refusal: what was wrong, what was expected, what came, what to do.

One function for each rule of `parity.py`; none of them decides anything.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..models.spec import ParityLimits, TensorSpec
from .divergence import SENTINEL, Divergence
from .verdict import AxisSlices, DecisionVerdict, Failure

MAX_TOLERABLE_SHARE = 0.1  # an error of a tenth of S, a tenth of the choices: no override is offered
MIN_TOLERABLE_DB = 10.0
_KEEP = "keep the node behind it in FP32 (--keep PATTERN, or keep = [...] under [precision])"
_OURS = "this is a fault of the rewritten program, not of the model: please report it"


def _accept(key: str, value: float, step: float, up: bool, tolerable: bool) -> str:
    """The override that would accept it, rounded to the lenient side; none for an answer that is garbage."""
    if not tolerable:
        return ""
    rounded = (math.ceil if up else math.floor)(value / step) * step
    return f", or accept it by setting {key} = {rounded:.4g} under [parity]"


def _accept_db(key: str, value: float) -> str:
    return _accept(key, value, 0.1, up=False, tolerable=value >= MIN_TOLERABLE_DB)


def _place(samples: Sequence[int], wrong: np.ndarray) -> tuple[tuple[int, ...], str]:
    place: tuple[int, ...] = tuple(np.argwhere(wrong)[0].tolist())
    inside = f" at [{','.join(map(str, place[1:]))}]" if place[1:] else ""
    return place, f"sample {samples[place[0]]}{inside}"


def nothing_judged() -> Failure:
    return Failure(
        "samples",
        "no real sample was judged: expected at least one, got 0; give more samples (--samples FILE)",
    )


def names(wanted: Sequence[str], came: Sequence[str]) -> Failure:
    return Failure("names", f"the outputs are not the model's: expected {wanted}, got {came}; {_OURS}")


def datatype(spec: TensorSpec, came: str) -> Failure:
    expected = f"output '{spec.name}' has the wrong datatype: expected {spec.datatype}, got {came}"
    return Failure("datatype", f"{expected}; {_OURS}")


def shape(
    spec: TensorSpec, expected: tuple[int, ...], whole: tuple[int, ...], half: tuple[int, ...]
) -> Failure:
    what = f"output '{spec.name}' has the wrong shape: expected {list(expected)}"
    return Failure(
        "shape", f"{what}, got {list(half)} from the half and {list(whole)} from the whole; {_OURS}"
    )


def mask(
    spec: TensorSpec,
    samples: Sequence[int],
    reference: np.ndarray,
    candidate: np.ndarray,
    wrong: np.ndarray,
) -> Failure:
    place, where = _place(samples, wrong)
    expected, came = float(reference[place]), float(candidate[place])
    sentinel = math.isfinite(expected) and abs(expected) >= SENTINEL
    rule = "sentinels" if sentinel else "masks"
    wanted = f"{expected:.4g} or what stands for it in half" if sentinel else f"{expected:.4g}"
    what = f"output '{spec.name}' is wrong at {int(wrong.sum())} place(s) that must match, first at {where}"
    return Failure(rule, f"{what}: expected {wanted}, got {came:.4g}; {_KEEP}")


def unequal(
    spec: TensorSpec,
    samples: Sequence[int],
    reference: np.ndarray,
    candidate: np.ndarray,
    wrong: np.ndarray,
) -> Failure:
    place, where = _place(samples, wrong)
    expected, came = reference[place].item(), candidate[place].item()
    what = (
        f"output '{spec.name}' ({spec.datatype}) must be equal but differs in {int(wrong.sum())} element(s)"
    )
    return Failure("equal", f"{what}, first at {where}: expected {expected}, got {came}; {_KEEP}")


def error(spec: TensorSpec, divergence: Divergence, limits: ParityLimits, u: float) -> Failure:
    came = divergence.in_units(divergence.worst, u)
    accept = _accept("max_error_u", came, 0.1, up=True, tolerable=came * u <= MAX_TOLERABLE_SHARE)
    return Failure(
        "max_error",
        f"output '{spec.name}' errs by {divergence.worst:.4g} at sample {divergence.worst_sample}, which is "
        f"{came:.4g}u of its largest magnitude {divergence.scale:.4g}: expected at most "
        f"{limits.max_error_u:g}u; {_KEEP}{accept}",
    )


def sqnr(spec: TensorSpec, divergence: Divergence, minimum: float) -> Failure:
    came = divergence.sqnr_db
    return Failure(
        "sqnr",
        f"output '{spec.name}' has a signal-to-noise ratio of {came:.1f} dB over all samples: expected at "
        f"least {minimum:.1f} dB; {_KEEP}{_accept_db('min_sqnr_db', came)}",
    )


def slice_sqnr(spec: TensorSpec, axis: AxisSlices, minimum: float) -> Failure:
    return Failure(
        "slice_sqnr",
        f"slice {axis.worst_index} along axis {axis.axis} of output '{spec.name}' has a signal-to-noise "
        f"ratio of {axis.worst_db:.1f} dB: expected at least {minimum:g} dB in every slice, so that none "
        f"dies behind larger ones; {_KEEP}{_accept_db('min_slice_sqnr_db', axis.worst_db)}",
    )


def divergence_nats(spec: TensorSpec, decisions: DecisionVerdict) -> Failure:
    return Failure(
        "kl",
        f"output '{spec.name}' ({spec.kind}) diverges by {decisions.kl_nats:.3g} nats at sample "
        f"{decisions.kl_sample}: expected at most {decisions.kl_limit:g}; {_KEEP}",
    )


def flips(spec: TensorSpec, decisions: DecisionVerdict) -> Failure:
    share = decisions.flipped / decisions.decisions
    first = decisions.flips[0]
    accept = _accept("max_flips", share, 1e-4, up=True, tolerable=share <= MAX_TOLERABLE_SHARE)
    return Failure(
        "flips",
        f"output '{spec.name}' changes its first choice in {decisions.flipped} of {decisions.decisions} "
        f"decisions: expected at most {decisions.max_flips:.3g} of them, got {share:.3g} (first at sample "
        f"{first.sample}: {first.whole} became {first.half}, margin {first.margin:.3g}); {_KEEP}{accept}",
    )


def accuracy(spec: TensorSpec, decisions: DecisionVerdict, allowed: float) -> Failure:
    return Failure(
        "accuracy",
        f"output '{spec.name}' is right in {decisions.accuracy_half:.4f} of {decisions.graded} graded "
        f"decisions where FP32 is in {decisions.accuracy_whole:.4f}: expected a difference of at most "
        f"{allowed:.4f}; {_KEEP}",
    )


def under(name: str, failure: Failure) -> Failure:
    """The same failure, said of an adversarial input."""
    return Failure(failure.rule, f"under the adversarial input '{name}', {failure.message}")
