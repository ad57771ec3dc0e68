"""The sentences of a refusal: what was wrong, what was expected, what came, what to do.

One function for each rule of `parity.py`; none of them decides anything.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...models.spec.spec import ParityLimits, TensorSpec
from .divergence import SENTINEL
from .measured import Measured
from .rule_verdicts import AxisSlices, DecisionVerdict, Failure, OrderVerdict
from .verdict import OutputVerdict

MAX_TOLERABLE_SHARE = 0.1  # an error of a tenth of S, a tenth of the choices: no override is offered
MIN_TOLERABLE_DB = 10.0
# Facts of each limit: in what steps it is offered, whether a larger one is more lenient, and where garbage begins.
_STEPS = {
    "max_error_u": (0.1, True, math.inf),  # garbage by its share of S
    "min_sqnr_db": (0.1, False, MIN_TOLERABLE_DB),
    "min_slice_sqnr_db": (0.1, False, MIN_TOLERABLE_DB),
    "max_kl_nats": (1e-5, True, MAX_TOLERABLE_SHARE),
    "max_flips": (1e-4, True, MAX_TOLERABLE_SHARE),
    "max_ties": (1e-4, True, MAX_TOLERABLE_SHARE),
    "max_swaps": (1e-5, True, MAX_TOLERABLE_SHARE),
    "min_top10_overlap": (0.1, False, 0.5),
}
_HOW = "(--keep PATTERN, or keep = [...] under [precision])"
_KEEP = f"keep the node behind it in FP32 {_HOW}"
_KEEP_HEAD = f"keep the head behind it in FP32 {_HOW}"
_OURS = "this is a fault of the rewritten program, not of the model: please report it"


def _accept(key: str, value: float) -> str:
    """The override that would accept it; none for an answer that is garbage."""
    limit = accepting(key, value)
    return "" if limit is None else f", or accept it by setting {key} = {limit:g} under [parity]"


def accepting(key: str, value: float) -> float | None:
    """The limit to set so that ``value`` passes, rounded to the lenient side; None where none should."""
    step, up, most = _STEPS[key]
    if not (value <= most if up else value >= most):
        return None
    exactly = value * (1 + 1e-12) if key == "max_error_u" else value  # there the gate multiplies
    limit = (math.ceil if up else math.floor)(exactly / step)
    while not (exactly <= round(limit * step, 6) if up else exactly >= round(limit * step, 6)):
        limit += 1 if up else -1
    return round(limit * step, 6)


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


def not_run(samples: Sequence[int], name: str, error: str) -> Failure:
    which = f"the adversarial input '{name}'" if name else f"sample {samples[0]}"
    return Failure(
        "refused",
        f"the half does not run with {which}, which the FP32 model takes: {error[:300]}; keep the node in FP32 that "
        f"computes the index or the size {_HOW}",
    )


def datatype(spec: TensorSpec, came: str) -> Failure:
    expected = f"output '{spec.name}' has the wrong datatype: expected {spec.datatype}, got {came}"
    return Failure("datatype", f"{expected}; {_OURS}")


def shape(
    spec: TensorSpec, expected: tuple[int, ...], original: tuple[int, ...], half: tuple[int, ...]
) -> Failure:
    what = f"output '{spec.name}' has the wrong shape: expected {list(expected)}"
    return Failure(
        "shape", f"{what}, got {list(half)} from the half and {list(original)} from the original; {_OURS}"
    )


def count(spec: TensorSpec, original: tuple[int, ...], half: tuple[int, ...]) -> Failure:
    return Failure(
        "shape",
        f"output '{spec.name}' has another number of elements, {list(half)} from the half where the original gives "
        f"{list(original)}: where values decide how many there are, half decided otherwise; {_KEEP}",
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


def steps(spec: TensorSpec, tied: int, elements: int, allowed: float) -> Failure:
    share = tied / elements
    return Failure(
        "flips",
        f"output '{spec.name}' ({spec.datatype}) lands on the other side of a step in {tied} of {elements} elements: "
        f"expected at most {allowed:.3g} of them, got {share:.3g}; give out the value before the step instead, or "
        f"{_KEEP}{_accept('max_flips', share)}",
    )


def no_things(shapes: dict[str, list[int]]) -> Failure:
    return Failure(
        "things",
        f"the outputs of kind 'detections' have the shapes {shapes} for one sample: expected boxes [things, 4], "
        "a score for each and its class, or one output of six columns or more; give another output another kind",
    )


def other_things(name: str, sample: int, score: float) -> Failure:
    return Failure(
        "things",
        f"output '{name}': the half finds other things than the original: of sample {sample} one side alone has a "
        f"thing of score {score:.4g}, and the other none of its class that overlaps it by half or more; {_KEEP}",
    )


def many_near_ties(name: str, free: int, things: int, allowed: float) -> Failure:
    accept = _accept("max_flips", free / max(things, 1))
    return Failure(
        "flips",
        f"output '{name}': {free} of {things} things are found by one side alone, with scores close to the least: "
        f"expected at most {allowed:.3g} of them; give out more things, or {_KEEP}{accept}",
    )


def error(spec: TensorSpec, measured: Measured, limits: ParityLimits, u: float) -> Failure:
    came = measured.error_u(u)
    accept = _accept("max_error_u", came) if came * u <= MAX_TOLERABLE_SHARE else ""
    return Failure(
        "max_error",
        f"output '{spec.name}' errs by {measured.worst:.4g} at sample {measured.worst_sample}, which is "
        f"{came:.4g}u of its largest magnitude {measured.scale:.4g}: expected at most "
        f"{limits.max_error_u:g}u; {_KEEP}{accept}",
    )


def sqnr(spec: TensorSpec, came: float, minimum: float) -> Failure:
    return Failure(
        "sqnr",
        f"output '{spec.name}' has a signal-to-noise ratio of {came:.1f} dB over all samples: expected at "
        f"least {minimum:.1f} dB; {_KEEP}{_accept('min_sqnr_db', came)}",
    )


def slice_sqnr(spec: TensorSpec, axis: AxisSlices, minimum: float) -> Failure:
    return Failure(
        "slice_sqnr",
        f"slice {axis.worst_index} along axis {axis.axis} of output '{spec.name}' has a signal-to-noise "
        f"ratio of {axis.worst_db:.1f} dB: expected at least {minimum:g} dB in every slice, so that none "
        f"dies behind larger ones; {_KEEP}{_accept('min_slice_sqnr_db', axis.worst_db)}",
    )


def divergence_nats(spec: TensorSpec, decisions: DecisionVerdict) -> Failure:
    return Failure(
        "kl",
        f"output '{spec.name}' ({spec.kind}) diverges by {decisions.kl_nats:.3g} nats at sample "
        f"{decisions.kl_sample}: expected at most {decisions.kl_limit:g}; {_KEEP}"
        f"{_accept('max_kl_nats', decisions.kl_nats)}",
    )


def flips(spec: TensorSpec, decisions: DecisionVerdict) -> Failure:
    share = decisions.flipped / decisions.decisions
    first = decisions.flips[0]
    accept = _accept("max_flips", share)
    return Failure(
        "flips",
        f"output '{spec.name}' changes its first choice in {decisions.flipped} of {decisions.decisions} "
        f"decisions: expected at most {decisions.max_flips:.3g} of them, got {share:.3g} (first at sample "
        f"{first.sample}: {first.original} became {first.half}, margin {first.margin:.3g}); {_KEEP}{accept}",
    )


def ties(spec: TensorSpec, order: OrderVerdict) -> Failure:
    return Failure(
        "ties",
        f"output '{spec.name}' ({spec.kind}) gives the same number to {order.tied} of {order.pairs} pairs that are "
        f"distinct in FP32, in {order.lists} ranking(s) of {order.rows} samples: expected at most "
        f"{100 * order.max_ties:g} % of them, got {100 * order.tied_share:.3g} %; {_KEEP_HEAD}"
        f"{_accept('max_ties', order.tied_share)}",
    )


def swaps(spec: TensorSpec, order: OrderVerdict) -> Failure:
    return Failure(
        "swaps",
        f"output '{spec.name}' ({spec.kind}) swaps {order.swapped} of {order.apart} pairs that are further apart than "
        f"the allowed error, the widest by {order.swap_u:.3g}u of the spread of its ranking: expected at most "
        f"{order.max_swaps:g} of them; {_KEEP}{_accept('max_swaps', order.swapped_share)}",
    )


def top10(spec: TensorSpec, order: OrderVerdict) -> Failure:
    kept = order.top10_overlap or 0.0
    return Failure(
        "top10",
        f"output '{spec.name}' ({spec.kind}) keeps {10 * kept:.0f} of the ten best samples of a ranking: expected at "
        f"least {order.min_top10_overlap:g} of them, got {kept:g}; {_KEEP}{_accept('min_top10_overlap', kept)}",
    )


def accuracy(spec: TensorSpec, decisions: DecisionVerdict, allowed: float) -> Failure:
    return Failure(
        "accuracy",
        f"output '{spec.name}' is right in {decisions.accuracy_half:.4f} of {decisions.graded} graded "
        f"decisions where FP32 is in {decisions.accuracy_original:.4f}: expected a difference of at most "
        f"{allowed:.4f}; {_KEEP}",
    )


def under(name: str, failure: Failure) -> Failure:
    """A failure with a message that names the adversarial input on which it was found."""
    return Failure(failure.rule, f"under the adversarial input '{name}', {failure.message}")


def perturbed(failure: Failure) -> Failure:
    """A gate failure that was found on a perturbed sample: the same rule, and a message that names the sample's
    origin."""
    way = "with 64 samples and more (--samples FILE), of which every second one judges, none are made"
    return Failure(failure.rule, f"on a perturbed copy of the few samples, {failure.message}; {way}")


def without_advice(failure: Failure) -> Failure:
    """A gate failure without the advice on how to convert the model otherwise: for another engine, of which it
    changes nothing, and where halfeven has already done what it asks for."""
    message = failure.message
    for advice in (_KEEP, _KEEP_HEAD, _OURS):
        message = message.replace(f"; {advice}", "")
    return Failure(failure.rule, message)


def section_of_range(output: OutputVerdict, floor_u: float, dtype: str, where: str) -> str:
    first = f"; the first node to go astray is {where}" if where else ""
    return (
        f"rounding alone costs output '{output.name}' {floor_u:.3g}u, which passes; its numbers left the "
        f"range of {dtype} (overflow or underflow){first}. FP32 nodes cure that {_HOW}"
    )


def section_of_precision(
    output: OutputVerdict, floor_u: float, dtype: str, override: Mapping[str, float]
) -> str:
    settings = ", ".join(f"{key} = {value:g}" for key, value in override.items())
    accept = f"; accept it by setting {settings} under [parity]" if settings else ""
    return (
        f"even with FP32's exponent the {dtype} mantissa costs output '{output.name}' {floor_u:.3g}u: no "
        f"{dtype} conversion of these nodes passes the limits; give more of them to FP32 {_HOW}{accept}"
    )
