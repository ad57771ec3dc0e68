"""The parity gate: may this half stand in for that original? Arrays in, numbers out.

The rules (docs/precision.md, "What the gate holds") for every output over all real judged samples; u is the half's unit
roundoff and S the largest |R| of that output:

0. an |R| ≥ 1e9 is a sentinel: C has its sign and |C| ≥ 1e4 or is infinite, and it is left out of the rest;
1. names, shapes, datatypes and the masks of NaN, +Inf and −Inf are the same (for adversarial inputs not the sizes that
   values decide, which are reported);
2. integers and booleans are equal (but for ties that the caller marks);
3. no sample errs by more than ``max_error_u``·u·S, the pooled signal-to-noise ratio and that of every slice
   along every non-batch axis reach their minimum: a channel of scores cannot die behind one of boxes. A slice that
   FP32 itself does not tell apart, or below 4u·S that is not lost, is reported and not judged (`divergence.py`);
4. logits and probabilities: divergence, first choices, and accuracy where there are targets;
5. score, probabilities and embedding: order (`order.py`): pairs that tie, pairs that swap, the ten best.

No limit of rules 3 and 4 is narrower than twice what FP32 answers otherwise when it is evaluated another way
(`noise.py`).

Adversarial inputs are held to rules 0 and 1 and reported for the others. Every comparison asks whether the
good case holds, so that NaN fails.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...models.spec.datatypes import name_of
from ...models.spec.spec import UNIT_ROUNDOFF, ModelSpec, ParityLimits, TensorSpec
from . import refusals
from .decisions import Decisions
from .divergence import SENTINEL, Divergence
from .found_sets import matched
from .limits import decision_faults, error_faults, min_sqnr_db, order_faults, step_faults, under_limits
from .measured import Measured, in_units, thinned
from .noise import Noise, with_room
from .order import measure_order
from .rule_verdicts import DecisionVerdict, Failure
from .trial import Pair, Trial, by_row, counted_axes, pairs_of
from .verdict import AdversarialVerdict, OutputVerdict, ParityReport

SENTINEL_LANDS = 1e4
MAX_PLOTTED_SAMPLES = 512


def overrides_of(limits: ParityLimits) -> dict[str, float | str]:
    """The limits that somebody set, as the report shows them."""
    return {key: getattr(limits, key) for key in limits.overridden}


def judge(
    spec: ModelSpec,
    dtype: str,
    real: Sequence[Trial],
    adversarial: Sequence[Trial] = (),
    targets: Mapping[str, np.ndarray] | None = None,
    unanswered: Sequence[str] = (),
    noise: Mapping[str, Noise] | None = None,
) -> ParityReport:
    """Hold a half's answers against the original's.

    ``dtype`` is ``fp16`` or ``bf16``. ``real`` are the judging samples, at every batch size that was asked;
    ``targets`` maps an output to the right classes, axis 0 the samples that ``Trial.samples`` counts.
    ``unanswered`` names adversarial inputs that the original itself could not answer: they are dropped and listed.
    ``noise``, by output, is FP32's own (`noise_of`).
    Without a single real sample nothing is proven and the report is a refusal.
    """
    u, targets, noise = UNIT_ROUNDOFF[dtype], targets or {}, noise or {}
    rows = [len(trial.samples) for trial in real]
    failures = [] if any(rows) else [refusals.nothing_judged()]
    failures += _unanswered(spec, (*real, *adversarial))
    real, other = matched(spec, dtype, real)
    adversarial, _ = matched(spec, dtype, adversarial)
    failures += other
    named = () if failures else spec.outputs
    judged, dropped = _with_finite_reference(adversarial)
    return ParityReport(
        dtype=dtype,
        u=u,
        samples=len({sample for trial in real for sample in trial.samples}),
        batch_sizes=tuple(sorted(set(rows))),
        outputs=tuple(
            judge_output(
                one, pairs_of(spec, one, real), spec.parity, dtype, targets.get(one.name), noise.get(one.name)
            )
            for one in named
        ),
        adversarial=tuple(
            _judge_adversarial(
                tensor, name, pairs_of(spec, tensor, trials), u, counted_axes(spec, tensor, real)
            )
            for name, trials in _by_name(judged).items()
            for tensor in named
        ),
        dropped=tuple(dict.fromkeys((*unanswered, *dropped))),
        overrides=overrides_of(spec.parity),
        failures=tuple(failures),
    )


def judge_output(
    spec: TensorSpec,
    pairs: Sequence[Pair],
    limits: ParityLimits,
    dtype: str,
    targets: np.ndarray | None = None,
    noise: Noise | None = None,
) -> OutputVerdict:
    """Judge one output over all its pairs, at all batch sizes together."""
    u = UNIT_ROUNDOFF[dtype]
    return verdict_of(spec, measure(spec, pairs, u, targets, noise), limits, u)


def noise_of(spec: ModelSpec, itself: Sequence[Trial]) -> dict[str, Noise]:
    """FP32's own noise, by output. ``itself``: trials whose candidate is the original, evaluated another way.

    An output that then has other NaN, infinities or integers is left out: its rules are not for FP32 to widen.
    """
    found = dict[str, Noise]()
    itself, _ = matched(spec, "fp16", itself)
    for tensor in spec.outputs if itself else ():
        pairs = pairs_of(spec, tensor, itself)
        if not tensor.type.is_float or _misshapen(tensor, pairs):
            continue
        divergence, fault = _diverge(tensor, pairs)
        if fault is None and np.isfinite(divergence.in_units(divergence.worst, 1.0)):
            found[tensor.name] = Noise.of(divergence, _decide(tensor, pairs, None))
    return found


def measure(
    spec: TensorSpec,
    pairs: Sequence[Pair],
    u: float,
    targets: np.ndarray | None = None,
    noise: Noise | None = None,
) -> Measured:
    """Everything about one output that no limit changes; `verdict_of` holds limits against it."""
    measured = Measured(samples=len({sample for pair in pairs for sample in pair.samples}))
    if fault := _misshapen(spec, pairs):
        return replace(measured, faults=(fault,))
    if not spec.type.is_float:
        return _measure_exact(spec, pairs, measured)
    divergence, fault = _diverge(spec, pairs)
    return replace(
        measured,
        faults=(fault,) if fault else (),
        tied=_once_each(pairs, [pair.replaced for pair in pairs]),
        stepped=_stepped(pairs),
        worst=divergence.worst,
        worst_sample=divergence.worst_sample,
        scale=divergence.scale,
        sqnr_db=divergence.sqnr_db,
        errors=divergence.errors_in_order(),
        axes=divergence.slices(u, noise.slices_db if noise else ()),
        decisions=None if fault else _decide(spec, pairs, targets),
        order=None if fault else measure_order(spec.kind, pairs, u),
        noise=noise and noise.numbers,
    )


def verdict_of(spec: TensorSpec, measured: Measured, limits: ParityLimits, u: float) -> OutputVerdict:
    """Hold limits against what was measured, none narrower than FP32's own noise allows."""
    limits = with_room(limits, measured.noise, u, min_sqnr_db(limits, u)) if measured.noise else limits
    decisions = measured.decisions
    if decisions is not None:
        decisions = replace(decisions, kl_limit=limits.max_kl_nats, max_flips=limits.max_flips)
    order = measured.order and under_limits(measured.order, limits)
    failures = list(measured.faults)
    if not failures:
        failures += error_faults(spec, measured, limits, u)
        failures += decision_faults(spec, decisions, measured.samples) if decisions else ()
        failures += order_faults(spec, order) if order else ()
        failures += step_faults(spec, measured, limits)
    in_u = np.array([in_units(error, u, measured.scale) for error in measured.errors])
    return OutputVerdict(
        name=spec.name,
        kind=spec.kind,
        datatype=spec.datatype,
        limit_u=limits.max_error_u,
        min_sqnr_db=min_sqnr_db(limits, u),
        min_slice_sqnr_db=limits.min_slice_sqnr_db,
        max_error_u=measured.error_u(u),
        sqnr_db=measured.sqnr_db,
        scale=measured.scale,
        worst_sample=measured.worst_sample,
        different=measured.different,
        tied=measured.tied,
        per_sample_error_u=thinned(in_u, MAX_PLOTTED_SAMPLES),
        axes=measured.axes,
        decisions=decisions,
        order=order,
        failures=tuple(failures),
        statistics=measured.to_json(),
    )


# Rules 0, 1 and 2: what must be the same.


def _unanswered(spec: ModelSpec, trials: Iterable[Trial]) -> list[Failure]:
    wanted = sorted(output.name for output in spec.outputs)
    for trial in trials:
        if trial.refused:
            return [refusals.not_run(trial.samples, trial.name, trial.refused)]
        for answer in (trial.reference, trial.candidate):
            if sorted(answer) != wanted:
                return [refusals.names(wanted, sorted(answer))]
    return []


def _misshapen(spec: TensorSpec, pairs: Sequence[Pair]) -> Failure | None:
    for pair in pairs:
        if (came := name_of(pair.candidate.dtype)) != spec.datatype:
            return refusals.datatype(spec, came)
        expected = (len(pair.samples), *pair.reference.shape[1:])
        if not (pair.candidate.shape == pair.reference.shape == expected):
            return _wrong_shape(spec, expected, pair)
    return None


def _wrong_shape(spec: TensorSpec, expected: tuple[int, ...], pair: Pair) -> Failure:
    original, half = pair.reference.shape, pair.candidate.shape
    axes = len(spec.shape)
    free = {axis + len(original) - axes for axis, dim in enumerate(spec.shape) if not dim.fixed} - {0}
    if original == expected and _only_there(original, half, free):
        return refusals.count(spec, original, half)
    return refusals.shape(spec, expected, original, half)


def _only_there(original: tuple[int, ...], half: tuple[int, ...], axes: Collection[int]) -> bool:
    """True if two shapes differ along these axes alone."""
    return len(original) == len(half) and all(
        one == other or axis in axes for axis, (one, other) in enumerate(zip(original, half, strict=True))
    )


def _unmasked(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """True for each element where the candidate lacks a NaN, an infinity or a sentinel of the reference (FP64), or has
    a NaN or an infinity of its own."""
    sentinel = np.isfinite(reference) & (np.abs(reference) >= SENTINEL)
    lands = (np.abs(candidate) >= SENTINEL_LANDS) & (np.sign(candidate) == np.sign(reference))
    same = (np.isnan(reference) == np.isnan(candidate)) & (
        np.where(np.isinf(reference), reference, 0.0) == np.where(np.isinf(candidate), candidate, 0.0)
    )
    return np.where(sentinel, ~lands, ~same)


def _diverge(spec: TensorSpec, pairs: Sequence[Pair]) -> tuple[Divergence, Failure | None]:
    divergence, failure = Divergence(), None
    for chunk in (chunk for pair in pairs for chunk in pair.chunks()):
        wrong = _unmasked(chunk.reference, chunk.candidate)
        if wrong.any() and failure is None:
            failure = refusals.mask(spec, chunk.samples, chunk.reference, chunk.candidate, wrong)
        divergence.add(chunk.samples, chunk.reference, chunk.candidate)
    return divergence, failure


def _measure_exact(spec: TensorSpec, pairs: Sequence[Pair], measured: Measured) -> Measured:
    different, tied, faults = 0, list[Sequence[int]](), ()
    worst: int | None = None
    for pair in pairs:
        wrong = _unequal(pair)
        if wrong.any() and not faults:
            worst = pair.samples[int(np.argwhere(wrong)[0][0])]
            faults = (refusals.unequal(spec, pair.samples, pair.reference, pair.candidate, wrong),)
        different += int(wrong.sum())
        tied.append(by_row((pair.candidate != pair.reference) & ~wrong))
    error, sqnr_db = (np.inf, -np.inf) if different else (0.0, np.inf)
    return replace(
        measured,
        faults=faults,
        worst=error,
        worst_sample=worst,
        sqnr_db=sqnr_db,
        different=different,
        tied=_once_each(pairs, tied),
        stepped=_stepped(pairs),
    )


def _stepped(pairs: Sequence[Pair]) -> int:
    """The number of elements that come from a step."""
    sizes = (
        [pair.reference.size // len(pair.samples)] * len(pair.samples) if pair.stepped else ()
        for pair in pairs
    )
    return _once_each(pairs, sizes)


def _once_each(pairs: Sequence[Pair], counts: Iterable[Sequence[int]]) -> int:
    """The sum of ``counts``, by pair and row, in which a sample that several batches asked is counted once: by the
    largest of its counts."""
    found = dict[int, int]()
    for pair, of_rows in zip(pairs, counts, strict=True):
        for sample, count in zip(pair.samples, of_rows, strict=False):
            found[sample] = max(found.get(sample, 0), count)
    return sum(found.values())


def _unequal(pair: Pair) -> np.ndarray:
    wrong = ~(pair.candidate == pair.reference)
    return wrong if pair.ties is None else wrong & ~pair.ties


# Rule 4: what the numbers decide.


def _decide(spec: TensorSpec, pairs: Sequence[Pair], targets: np.ndarray | None) -> DecisionVerdict | None:
    if spec.kind not in ("logits", "probabilities"):
        return None
    decisions = Decisions(spec.kind)
    for chunk in (chunk for pair in pairs for chunk in pair.chunks()):
        if chunk.reference.ndim > 1 and chunk.reference.size:
            right = None if targets is None else targets[list(chunk.samples)]
            decisions.add(chunk.samples, chunk.reference, chunk.candidate, right)
    return decisions.verdict()


# Adversarial inputs.


def _with_finite_reference(trials: Sequence[Trial]) -> tuple[list[Trial], tuple[str, ...]]:
    def finite(trial: Trial) -> bool:
        return all(np.isfinite(array.astype(np.float64)).all() for array in trial.reference.values())

    judged = [trial for trial in trials if finite(trial)]
    return judged, tuple(trial.name for trial in trials if not finite(trial))


def _by_name(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """The trials by the name of their input; an ONNX half has answered each with its runtime and with its storage."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.name, []).append(trial)
    return found


def _judge_adversarial(
    spec: TensorSpec, name: str, pairs: Sequence[Pair], u: float, counted: Collection[int]
) -> AdversarialVerdict:
    """``counted``: the axes whose sizes the values decide; another size there is reported, as another integer is."""
    if failure := _misshapen(spec, pairs):
        if all(_only_there(pair.reference.shape, pair.candidate.shape, counted) for pair in pairs):
            different = sum(abs(pair.reference.size - pair.candidate.size) for pair in pairs)
            return AdversarialVerdict(name, spec.name, np.inf, -np.inf, different)
        return AdversarialVerdict(name, spec.name, np.inf, -np.inf, 0, (refusals.under(name, failure),))
    if not spec.type.is_float:
        different = sum(int(_unequal(pair).sum()) for pair in pairs)
        return AdversarialVerdict(name, spec.name, np.inf if different else 0.0, np.inf, different)
    divergence, failure = _diverge(spec, pairs)
    error = divergence.in_units(divergence.worst, u)
    failures = (refusals.under(name, failure),) if failure else ()
    return AdversarialVerdict(name, spec.name, error, divergence.sqnr_db, 0, failures)
