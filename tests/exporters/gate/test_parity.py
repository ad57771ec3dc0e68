"""Claims about the gate. Every draw is fresh; the seed is in the failure's header when one fails."""

import json
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from halfeven.exporters.gate.decisions import Decisions
from halfeven.exporters.gate.parity import (
    UNIT_ROUNDOFF,
    judge,
    judge_output,
    measure,
    min_sqnr_db,
    verdict_of,
)
from halfeven.exporters.gate.trial import Pair, Trial
from halfeven.exporters.gate.verdict import OutputVerdict
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec

FP16, BF16 = UNIT_ROUNDOFF["fp16"], UNIT_ROUNDOFF["bf16"]
LOOSE = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9, min_slice_sqnr_db=-1e9, max_flips=1.0)


def tensor(*inner: int, datatype: str = "FP32", kind: str = "tensor", name: str = "out") -> TensorSpec:
    return TensorSpec(name, datatype, (Dim(), *(Dim(size, size) for size in inner)), kind)


def judged(
    reference: np.ndarray,
    candidate: np.ndarray,
    *,
    limits: ParityLimits | None = None,
    kind: str = "tensor",
    datatype: str = "FP32",
    dtype: str = "fp16",
    targets: np.ndarray | None = None,
    ties: np.ndarray | None = None,
) -> OutputVerdict:
    pair = Pair(tuple(range(len(reference))), reference, candidate, ties)
    spec = tensor(*reference.shape[1:], kind=kind, datatype=datatype)
    return judge_output(spec, [pair], limits or ParityLimits(), dtype, targets)


def rules(verdict: OutputVerdict) -> list[str]:
    return [failure.rule for failure in verdict.failures]


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def placed(
    random: np.random.Generator, value: float, *, other: float | None = None
) -> tuple[np.ndarray, ...]:
    """The same numbers twice, with one special value at one random place of each (or of the first only)."""
    reference = numbers(random, 6, 7)
    candidate = reference.copy()
    place = tuple(random.integers(0, size) for size in reference.shape)
    reference[place] = value
    candidate[place] = value if other is None else other
    return reference, candidate


# Rules 0 and 1


def test_equal_answers_pass_with_no_error(random):
    reference = numbers(random, 9, 4)
    verdict = judged(reference, reference.copy())
    assert verdict.passed and verdict.exact and verdict.sqnr_db == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_candidate_that_is_not_finite_where_the_original_is_fails(random, value):
    reference, candidate = placed(random, 0.5, other=value)
    verdict = judged(reference, candidate, limits=LOOSE, kind="logits")
    assert rules(verdict) == ["masks"] and verdict.max_error_u == math.inf
    assert verdict.decisions is None  # nothing is read off numbers that are none


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_both_passes(random, value):
    verdict = judged(*placed(random, value))
    assert verdict.passed and verdict.exact


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_where_the_original_is_not_finite_fails(random, value):
    assert rules(judged(*placed(random, value, other=1.0), limits=LOOSE)) == ["masks"]


@pytest.mark.parametrize(
    ("value", "other"),
    [(math.inf, -math.inf), (-math.inf, math.inf), (math.nan, math.inf), (math.inf, math.nan)],
)
def test_which_infinity_it_is_matters(random, value, other):
    assert rules(judged(*placed(random, value, other=other), limits=LOOSE)) == ["masks"]


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_true_infinity_is_no_sentinel_and_must_come_back_infinite(random, sign):
    assert rules(judged(*placed(random, sign * math.inf, other=sign * 65504.0), limits=LOOSE)) == ["masks"]


@pytest.mark.parametrize("value", [-3.4e38, 3.4e38, -1e9, 1e9])
@pytest.mark.parametrize("other", [65504.0, 1e4, math.inf])
def test_a_sentinel_may_land_anywhere_far_out_on_its_side(random, value, other):
    verdict = judged(*placed(random, value, other=math.copysign(other, value)))
    assert verdict.passed and verdict.exact


@pytest.mark.parametrize("other", [-9_999.0, 65504.0, math.inf, 0.0, math.nan])
def test_a_sentinel_that_comes_back_small_or_on_the_other_side_fails(random, other):
    assert rules(judged(*placed(random, -3.4e38, other=other), limits=LOOSE)) == ["sentinels"]


def test_a_large_number_below_the_sentinels_is_judged_as_a_number(random):
    verdict = judged(*placed(random, 9.9e8, other=8e8))
    assert "max_error" in rules(verdict) and verdict.scale == pytest.approx(9.9e8)


def test_sentinels_do_not_stretch_the_scale(random):
    reference = numbers(random, 5, 8)
    candidate = reference + np.float32(8 * FP16 * np.abs(reference).max())
    reference[:, 3], candidate[:, 3] = -3.4e38, -65504.0
    assert "max_error" in rules(judged(reference, candidate))


def test_another_shape_or_datatype_is_named_with_what_came(random):
    reference = numbers(random, 3, 4)
    (shape,) = judged(reference, reference[:, :3].copy()).failures
    (datatype,) = judged(reference, reference.astype(np.float16)).failures
    assert shape.rule == "shape" and "[3, 4]" in shape.message and "[3, 3]" in shape.message
    assert datatype.rule == "datatype" and "expected FP32, got FP16" in datatype.message


def test_fewer_rows_than_samples_fail_even_where_both_agree(random):
    reference = numbers(random, 3, 4)
    verdict = judge_output(tensor(4), [Pair((0, 1), reference, reference)], LOOSE, "fp16")
    assert rules(verdict) == ["shape"]


def test_an_output_of_nothing_passes():
    empty = np.zeros((4, 0, 3), np.float32)
    assert judged(empty, empty, kind="logits").passed


# Rule 2


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("INT64", np.int64), ("UINT8", np.uint8), ("BOOL", np.bool_)]
)
def test_an_integer_or_boolean_that_differs_fails(random, datatype, dtype):
    reference = random.integers(0, 2, (5, 6)).astype(dtype)
    candidate = reference.copy()
    assert judged(reference, candidate, datatype=datatype).passed
    candidate[4, 2] = 1 - candidate[4, 2]
    verdict = judged(reference, candidate, datatype=datatype, limits=LOOSE)
    assert rules(verdict) == ["equal"] and verdict.different == 1
    assert verdict.worst_sample == 4 and "sample 4 at [2]" in verdict.failures[0].message


def test_integers_beyond_the_sentinels_are_still_integers(random):
    reference = random.integers(1 << 40, 1 << 41, (3, 3))
    assert rules(judged(reference, reference + 1, datatype="INT64")) == ["equal"]


def test_an_integer_may_differ_only_where_its_scores_tie(random):
    reference = random.integers(0, 9, (5, 6))
    candidate, ties = reference.copy(), np.zeros((5, 6), bool)
    candidate[1, 1] += 1
    ties[1, 1] = True
    tied = judged(reference, candidate, datatype="INT64", ties=ties)
    assert tied.passed and (tied.tied, tied.different) == (1, 0)
    assert not judged(reference, candidate, datatype="INT64", ties=~ties).passed


# Rule 3


def with_error(random: np.random.Generator, share_of_s: float) -> tuple[np.ndarray, np.ndarray]:
    """One element of a large FP64 output is off by exactly ``share_of_s`` · S; S is a power of two."""
    reference = random.uniform(-1, 1, (40, 500))
    scale = 2.0 ** int(random.integers(-9, 9))
    reference[3, 4] = 1.0
    reference[17, 250] = 0.5
    reference *= scale
    candidate = reference.copy()
    candidate[17, 250] += random.choice([-1, 1]) * share_of_s * scale
    return reference, candidate


@pytest.mark.parametrize(("dtype", "u"), [("fp16", FP16), ("bf16", BF16)])
def test_an_error_at_the_limit_passes_and_one_just_above_fails(random, dtype, u):
    for limit in (4.0, float(random.integers(1, 9))):
        limits = ParityLimits(max_error_u=limit, min_sqnr_db=-1e9, min_slice_sqnr_db=-1e9)
        at, above = (with_error(random, limit * u * more) for more in (1.0, 1.0 + 2.0**-20))
        assert judged(*at, limits=limits, dtype=dtype, datatype="FP64").passed
        verdict = judged(*above, limits=limits, dtype=dtype, datatype="FP64")
        assert rules(verdict) == ["max_error"] and verdict.worst_sample == 17


def test_u_is_that_of_the_half():
    assert np.finfo(np.float16).eps / 2 == FP16
    assert float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) / 2 == BF16


def test_the_error_is_told_in_units_of_u_and_the_largest_magnitude(random):
    error = float(random.uniform(0.1, 3.9))
    verdict = judged(*with_error(random, error * FP16), datatype="FP64")
    assert (
        verdict.max_error_u == pytest.approx(error) and verdict.per_sample_error_u[17] == verdict.max_error_u
    )
    assert len(verdict.per_sample_error_u) == 40 and sum(verdict.per_sample_error_u) == verdict.max_error_u


def test_noise_at_the_minimum_ratio_passes_and_just_below_fails(random):
    reference = numbers(random, 50, 40).astype(np.float64)
    noise = numbers(random, 50, 40).astype(np.float64)
    noise *= math.sqrt((reference**2).sum() / (noise**2).sum())
    limits = ParityLimits(max_error_u=1e9, min_slice_sqnr_db=-1e9)
    for over, expected in ((0.001, []), (-0.001, ["sqnr"])):
        candidate = reference + noise * 10 ** (-(20 * math.log10(1 / FP16) - 10 + over) / 20)
        assert rules(judged(reference, candidate, limits=limits, datatype="FP64")) == expected


def test_a_ratio_that_is_exactly_the_minimum_passes_and_the_next_number_above_fails(random):
    reference = numbers(random, 20, 9).astype(np.float64)
    candidate = reference + 0.01 * numbers(random, 20, 9)
    seen = judged(reference, candidate, limits=LOOSE, datatype="FP64")
    worst = min(axis.worst_db for axis in seen.axes)
    for pooled, slices, expected in (
        (seen.sqnr_db, worst, []),
        (math.nextafter(seen.sqnr_db, math.inf), worst, ["sqnr"]),
        (seen.sqnr_db, math.nextafter(worst, math.inf), ["slice_sqnr"]),
    ):
        limits = ParityLimits(1e9, pooled, slices)
        assert rules(judged(reference, candidate, limits=limits, datatype="FP64")) == expected


def test_the_default_ratio_follows_u_and_an_override_wins():
    assert min_sqnr_db(ParityLimits(), FP16) == pytest.approx(56.23, abs=0.01)
    assert min_sqnr_db(ParityLimits(), BF16) == pytest.approx(38.16, abs=0.01)
    assert min_sqnr_db(ParityLimits(min_sqnr_db=12.0), FP16) == 12.0
    assert min_sqnr_db(ParityLimits(min_sqnr_db=0.0), FP16) == 0.0


@pytest.mark.parametrize("axis", [1, 2])
def test_scores_zeroed_behind_large_boxes_are_refused_by_the_slice_rule_alone(random, axis):
    shape = [60, 30, 30]
    shape[axis] = 6
    reference = random.uniform(0, 640, shape).astype(np.float32)
    scores = (slice(None),) * axis + (5,)
    reference[scores] = random.uniform(0, 1, reference[scores].shape)
    candidate = reference.copy()
    candidate[scores] = 0
    (failure,) = judged(reference, candidate).failures
    assert failure.rule == "slice_sqnr"
    assert f"slice 5 along axis {axis}" in failure.message and "0.0 dB" in failure.message


def test_a_slice_at_the_minimum_ratio_passes_and_just_below_fails(random):
    reference = numbers(random, 20, 9).astype(np.float64)
    for over, expected in ((0.001, []), (-0.001, ["slice_sqnr"])):
        candidate = reference.copy()
        candidate[:, 7] *= 1 + 10 ** (-(30 + over) / 20)
        limits = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9)
        verdict = judged(reference, candidate, limits=limits, datatype="FP64")
        assert rules(verdict) == expected
        assert verdict.worst_slice and (verdict.worst_slice.axis, verdict.worst_slice.worst_index) == (1, 7)


@pytest.mark.parametrize(("share", "expected"), [(2.0**-20, []), (2.0**-19.9, ["slice_sqnr"])])
def test_only_slices_above_dust_are_judged(random, share, expected):
    reference = random.uniform(0.5, 1, (10, 5))
    reference[0, 0] = 1.0
    reference[:, 2] = share
    candidate = reference.copy()
    candidate[:, 2] = 0
    assert rules(judged(reference, candidate, datatype="FP64")) == expected


def test_slices_are_found_in_samples_of_different_lengths(random):
    pairs = []
    for sample, length in enumerate((5, 12, 7)):
        reference = random.uniform(100, 200, (1, length, 3)).astype(np.float32)
        reference[:, 11:] = 1.0
        candidate = reference.copy()
        candidate[:, 11:] = 0.0
        pairs.append(Pair((sample,), reference, candidate))
    verdict = judge_output(
        TensorSpec("out", "FP32", (Dim(), Dim(), Dim(3, 3))), pairs, ParityLimits(max_error_u=99), "fp16"
    )
    worst = verdict.worst_slice
    assert (
        "slice_sqnr" in rules(verdict)
        and worst
        and (worst.axis, worst.worst_index, worst.length) == (1, 11, 12)
    )


def test_at_most_4096_slices_of_an_axis_are_judged_from_end_to_end(random):
    reference = random.uniform(1, 2, (2, 10_000))
    candidate = reference.copy()
    candidate[:, -1] = 0
    verdict = judged(reference, candidate, limits=ParityLimits(1e9, -1e9), datatype="FP64")
    (axis,) = verdict.axes
    assert (axis.judged, axis.length, axis.worst_index, len(axis.db)) == (4096, 10_000, 9_999, 256)
    assert rules(verdict) == ["slice_sqnr"]


def test_where_the_original_is_zero_the_half_must_be(random):
    zero = np.zeros((4, 5), np.float32)
    assert judged(zero, zero).passed
    dust = zero.copy()
    dust[2, 3] = 1e-30
    verdict = judged(zero, dust)
    assert rules(verdict) == ["max_error", "sqnr"] and verdict.max_error_u == math.inf


def test_the_errors_are_told_in_the_samples_order_however_they_were_asked(random):
    reference = np.ones((5, 3))
    pairs = []
    for sample in (3, 0, 4, 1, 2):
        candidate = reference[:1] + sample * FP16
        pairs.append(Pair((sample,), reference[:1], candidate))
    spec = tensor(3, datatype="FP64")
    assert judge_output(spec, pairs, LOOSE, "fp16").per_sample_error_u == (0.0, 1.0, 2.0, 3.0, 4.0)


def test_an_error_in_any_batch_size_decides_and_s_is_over_all(random):
    reference = numbers(random, 8, 6)
    reference[0, 0] = 100.0
    bad = reference[4:7].copy()
    bad[1, 2] += 100 * 5 * FP16
    pairs = [Pair(tuple(range(8)), reference, reference.copy()), Pair((4, 5, 6), reference[4:7], bad)]
    verdict = judge_output(tensor(6), pairs, ParityLimits(), "fp16")
    assert verdict.worst_sample == 5 and verdict.max_error_u == pytest.approx(5, rel=1e-3)
    assert "max_error" in rules(verdict)


def test_a_refusal_names_an_override_for_a_small_excess_and_none_for_garbage(random):
    small = judged(*with_error(random, 7.23 * FP16), datatype="FP64").failures[0].message
    assert "max_error_u = 7.3 under [parity]" in small and "--keep" in small
    garbage = judged(*with_error(random, 0.9), datatype="FP64").failures[0].message
    assert "under [parity]" not in garbage
    reference = close_logits(random, 10, [])
    verdict = judged(reference, -reference, kind="logits", datatype="FP64")
    assert len(verdict.failures) == 5
    assert not any("under [parity]" in failure.message for failure in verdict.failures)


def test_bfloat16_outputs_are_compared_as_numbers(random):
    reference = numbers(random, 6, 5).astype(ml_dtypes.bfloat16)
    assert judged(reference, reference.copy(), datatype="BF16", dtype="bf16").passed
    negated = np.negative(reference)
    assert "max_error" in rules(judged(reference, negated, datatype="BF16", dtype="bf16"))


# Rule 4


def close_logits(random: np.random.Generator, rows: int, margins: list[float]) -> np.ndarray:
    """Logits whose first choice is class 0, by 3 or (in the first rows) by the given margins over class 1."""
    logits = random.uniform(-9, -5, (rows, 6))
    logits[:, 0], logits[:, 1] = 3.0, 0.0
    logits[: len(margins), 1] = 3.0 - np.array(margins)
    return logits


def test_changed_first_choices_are_counted_and_listed_with_their_margin(random):
    margins = random.uniform(1e-4, 1e-3, 3).tolist()
    reference = close_logits(random, 100, margins)
    candidate = reference.copy()
    candidate[:3, 1] += 2e-3
    for max_flips, expected in ((0.03, []), (0.0299, ["flips"])):
        limits = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9, max_flips=max_flips)
        verdict = judged(reference, candidate, limits=limits, kind="logits", datatype="FP64")
        assert rules(verdict) == expected
        assert verdict.decisions and verdict.decisions.flipped == 3 and verdict.decisions.decisions == 100
        assert all("max_flips = 0.03 under [parity]" in failure.message for failure in verdict.failures)
        found = [(flip.sample, flip.position, flip.original, flip.half) for flip in verdict.decisions.flips]
        assert found == [(row, (), 0, 1) for row in range(3)]
        assert [flip.margin for flip in verdict.decisions.flips] == pytest.approx(margins, rel=1e-6)


def test_a_share_of_flips_that_is_the_limit_passes_however_it_is_written(random):
    count = int(random.integers(1, 100))
    reference = close_logits(random, 100, [1e-3] * count)
    candidate = reference.copy()
    candidate[:count, 1] += 2e-3
    limits = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9, max_flips=float(f"{count / 100:.2f}"))
    assert judged(reference, candidate, limits=limits, kind="logits", datatype="FP64").passed


def test_classes_that_the_original_holds_equal_are_both_right(random):
    reference = close_logits(random, 10, [0.0])
    candidate = reference.copy()
    candidate[0, 1] += 1e-6
    verdict = judged(reference, candidate, kind="logits", datatype="FP64")
    assert verdict.passed and verdict.decisions and verdict.decisions.flipped == 0


def test_every_position_of_a_sequence_is_a_decision(random):
    reference = np.stack([close_logits(random, 7, []) for _ in range(4)])
    candidate = reference.copy()
    candidate[2, 5, 3] = 4.0
    decisions = judged(reference, candidate, limits=LOOSE, kind="logits", datatype="FP64").decisions
    assert decisions and decisions.decisions == 28
    (flip,) = decisions.flips
    assert (flip.sample, flip.position, flip.half) == (2, (5,), 3)


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_divergence_at_the_limit_passes_and_above_fails(random, kind):
    p, delta = 0.4, 0.0
    for target, expected in ((0.99e-4, []), (1.01e-4, ["kl"])):
        low, high = 0.0, 0.1
        for _ in range(60):  # bisection on the binary divergence p·ln(p/q) + (1−p)·ln((1−p)/(1−q))
            delta = (low + high) / 2
            q = p + delta
            nats = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            low, high = (delta, high) if nats < target else (low, delta)
        pair = [np.array([[1 - at, at]] * 3) for at in (p, p + delta)]
        if kind == "logits":
            pair = [np.log(values) + float(random.uniform(-5, 5)) for values in pair]
        else:
            pair = [values * random.uniform(0.9, 1.1) for values in pair]
        verdict = judged(*pair, limits=LOOSE, kind=kind, datatype="FP64")
        assert rules(verdict) == expected
        assert verdict.decisions and verdict.decisions.kl_nats == pytest.approx(target, rel=1e-3)


def test_a_class_too_rare_for_half_does_not_make_the_divergence_infinite():
    reference = np.array([[1.0 - 1e-9, 1e-9, 0.0]])
    verdict = judged(reference, np.array([[1.0, 0.0, 0.0]]), kind="probabilities", datatype="FP64")
    assert verdict.passed


def test_masked_classes_have_no_probability(random):
    reference = close_logits(random, 20, [])
    candidate = reference.copy()
    reference[:, 4], candidate[:, 4] = -3.4e38, -math.inf
    reference[:, 5] = candidate[:, 5] = -math.inf
    reference[7] = candidate[7] = -math.inf
    verdict = judged(reference, candidate, kind="logits", datatype="FP64")
    assert verdict.passed and verdict.decisions and verdict.decisions.decisions == 19


def test_accuracy_may_differ_by_one_sample_and_no_more(random):
    rows = 100
    reference = close_logits(random, rows, [1e-3] * 4)
    targets = np.zeros(rows, np.int64)
    for flipped, expected in ((1, []), (2, ["accuracy"])):
        candidate = reference.copy()
        candidate[:flipped, 1] += 2e-3
        limits = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9, max_flips=1.0)
        verdict = judged(reference, candidate, limits=limits, kind="logits", datatype="FP64", targets=targets)
        assert rules(verdict) == expected
        assert verdict.decisions and verdict.decisions.accuracy_original == 1.0
        assert verdict.decisions.accuracy_half == pytest.approx(1 - flipped / rows)


def test_accuracy_may_differ_by_a_fifth_of_a_point_of_many_samples(random):
    rows = 2000
    reference = close_logits(random, rows, [1e-3] * 5)
    for flipped, expected in ((4, []), (5, ["accuracy"])):
        candidate = reference.copy()
        candidate[:flipped, 1] += 2e-3
        targets = np.zeros(rows, np.int64)
        limits = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9, max_flips=1.0)
        verdict = judged(reference, candidate, limits=limits, kind="logits", datatype="FP64", targets=targets)
        assert rules(verdict) == expected


def test_a_half_that_is_right_where_the_original_is_wrong_is_not_the_same_model_either(random):
    reference = close_logits(random, 100, [1e-3] * 2)
    targets = np.where(np.arange(100) < 2, 1, 0)
    for flipped, expected in ((1, []), (2, ["accuracy"])):
        candidate = reference.copy()
        candidate[:flipped, 1] += 2e-3
        limits = ParityLimits(max_error_u=1e9, min_sqnr_db=-1e9, max_flips=1.0)
        verdict = judged(reference, candidate, limits=limits, kind="logits", datatype="FP64", targets=targets)
        assert rules(verdict) == expected


@pytest.mark.parametrize("number", ["worst", "sqnr_db", "kl_nats"])
def test_a_number_that_is_none_fails_its_rule(random, number):
    reference = close_logits(random, 10, [])
    spec, pair = tensor(6, kind="logits", datatype="FP64"), Pair(tuple(range(10)), reference, reference)
    measured = measure(spec, [pair], FP16)
    assert verdict_of(spec, measured, ParityLimits(), FP16).passed and measured.decisions
    if number == "kl_nats":
        measured = replace(measured, decisions=replace(measured.decisions, kl_nats=math.nan))
    else:
        measured = replace(measured, **{number: math.nan})
    (failed,) = rules(verdict_of(spec, measured, ParityLimits(), FP16))
    assert failed == {"worst": "max_error", "sqnr_db": "sqnr", "kl_nats": "kl"}[number]


def test_a_divergence_that_is_no_number_stays_none_at_every_batch_size(random):
    decisions, original = Decisions("logits"), close_logits(random, 1, [])
    for half in (original, np.full_like(original, math.nan), original):
        decisions.add((0,), original, half)
    assert math.isnan(decisions.verdict().kl_nats)


def test_negative_targets_are_not_graded(random):
    reference = close_logits(random, 10, [])
    targets = np.where(np.arange(10) < 4, -100, 0)
    decisions = judged(reference, reference, kind="logits", datatype="FP64", targets=targets).decisions
    assert decisions and decisions.graded == 6 and decisions.accuracy_half == 1.0


def test_a_tensor_is_not_asked_what_it_decides(random):
    reference = numbers(random, 5, 5)
    assert judged(reference, reference, targets=np.zeros(5, np.int64)).decisions is None


# The whole report


def model(*outputs: TensorSpec, max_batch_size: int = 8, limits: ParityLimits | None = None) -> ModelSpec:
    x = TensorSpec("x", "FP32", (Dim(), Dim(3, 3)))
    return ModelSpec("m", (x,), outputs, max_batch_size=max_batch_size, parity=limits or ParityLimits())


def same(answer: np.ndarray, samples: tuple[int, ...], name: str = "") -> Trial:
    return Trial(samples, {"out": answer}, {"out": answer.copy()}, name=name)


def test_a_report_tells_samples_batch_sizes_and_the_rule_of_three(random):
    answers = numbers(random, 10, 4)
    trials = [same(answers[i : i + n], tuple(range(i, i + n))) for n in (1, 2, 5) for i in range(0, 10, n)]
    report = judge(model(tensor(4)), "fp16", trials)
    assert report.passed and (report.samples, report.batch_sizes) == (10, (1, 2, 5))
    assert report.rule_of_three == pytest.approx(0.3)
    assert report.summary() == "passed: no error in fp16 over 10 samples at batch sizes 1, 2, 5"


def test_without_a_real_sample_nothing_is_proven():
    report = judge(model(tensor(4)), "fp16", [])
    assert not report.passed and [failure.rule for failure in report.failures] == ["samples"]


def test_missing_and_surplus_outputs_are_named(random):
    answer = numbers(random, 2, 4)
    for came in ({}, {"out": answer, "more": answer}, {"other": answer}):
        report = judge(model(tensor(4)), "fp16", [Trial((0, 1), {"out": answer}, came)])
        assert not report.passed and report.all_failures[0].rule == "names"
        assert str(sorted(came)) in report.summary()


def test_a_model_that_is_not_batched_answers_without_a_batch_axis(random):
    spec = model(TensorSpec("out", "FP32", (Dim(), Dim(4, 4))), max_batch_size=0)
    lengths = random.integers(1, 9, 6)
    trials = [same(numbers(random, length, 4), (i,)) for i, length in enumerate(lengths)]
    report = judge(spec, "fp16", trials)
    assert report.passed and report.samples == 6 and [axis.axis for axis in report.outputs[0].axes] == [1, 2]
    worse = trials[0].reference["out"].copy()
    worse[0, 0] = math.nan
    assert not judge(spec, "fp16", [Trial((0,), trials[0].reference, {"out": worse})]).passed


def test_adversarial_inputs_decide_masks_and_are_told_for_the_rest(random):
    answers = numbers(random, 4, 4)
    real, wrong = [same(answers, (0, 1, 2, 3))], answers * np.float32(1.5)
    reply = judge(
        model(tensor(4)), "fp16", real, [Trial((0, 1, 2, 3), {"out": answers}, {"out": wrong}, name="x")]
    )
    assert reply.passed and reply.adversarial[0].max_error_u == pytest.approx(0.5 / FP16, rel=1e-5)
    wrong[2, 1] = math.inf
    refused = judge(
        model(tensor(4)), "fp16", real, [Trial((0, 1, 2, 3), {"out": answers}, {"out": wrong}, name="x")]
    )
    assert not refused.passed and "adversarial input 'x'" in refused.summary()


@pytest.mark.parametrize("first", [True, False])
def test_an_adversarial_input_that_was_answered_twice_is_told_once_and_one_wrong_answer_decides(
    random, first
):
    """An ONNX half answers with its runtime and with its storage."""
    answers = numbers(random, 4, 4)
    rows, wrong = (0, 1, 2, 3), answers * np.float32(1.5)
    odd = [Trial(rows, {"out": answers}, {"out": other}, name="x") for other in (answers, wrong)]
    reply = judge(model(tensor(4)), "fp16", [same(answers, rows)], odd if first else odd[::-1])
    assert [found.input for found in reply.adversarial] == ["x"]
    assert reply.adversarial[0].max_error_u == pytest.approx(0.5 / FP16, rel=1e-5)
    wrong[2, 1] = math.nan
    assert not judge(model(tensor(4)), "fp16", [same(answers, rows)], odd if first else odd[::-1]).passed


def test_adversarial_inputs_of_another_shape_are_refused_and_integers_only_told(random):
    answers, integers = numbers(random, 4, 4), random.integers(0, 9, (4, 4))
    trial = Trial((0, 1, 2, 3), {"out": answers}, {"out": answers[:, :2].copy()}, name="short")
    assert not judge(model(tensor(4)), "fp16", [same(answers, (0, 1, 2, 3))], [trial]).passed
    trial = Trial((0, 1, 2, 3), {"out": integers}, {"out": integers + 1}, name="other")
    report = judge(model(tensor(4, datatype="INT64")), "fp16", [same(integers, (0, 1, 2, 3))], [trial])
    assert report.passed and report.adversarial[0].different == 16


@pytest.mark.parametrize("free", [True, False])
def test_another_number_of_things_found_is_refused_of_samples_and_only_told_of_adversarial_inputs(
    random, free
):
    """A detector finds another number of boxes in a picture that is a hundred times darker."""
    found = TensorSpec("out", "INT64", (Dim(), Dim(3, 3)) if free else (Dim(13, 13), Dim(3, 3)))
    picture = TensorSpec("x", "FP32", (Dim(8, 8),))
    spec = ModelSpec("net", (picture,), (found,), max_batch_size=0)
    rows, more = np.zeros((13, 3), np.int64), np.zeros((15, 3), np.int64)
    real = [same(rows, (0,))]
    other = Trial((0,), {"out": rows}, {"out": more}, name="dark")
    report = judge(spec, "fp16", real, [other])
    assert report.passed == free and report.adversarial[0].different == (6 if free else 0)
    refused = judge(spec, "fp16", [other])
    assert not refused.passed and ("please report it" in refused.summary()) == (not free)
    assert ("[1, 15, 3] from the half where the original gives [1, 13, 3]" in refused.summary()) == free


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adversarial_input_without_a_finite_reference_is_dropped_and_listed(random, value):
    answers = numbers(random, 2, 4)
    broken = answers.copy()
    broken[0, 0] = value
    trial = Trial((0, 1), {"out": broken}, {"out": answers}, name="longest")
    report = judge(model(tensor(4)), "fp16", [same(answers, (0, 1))], [trial])
    assert report.passed and report.dropped == ("longest",) and report.adversarial == ()


def test_an_adversarial_input_that_the_original_cannot_answer_is_listed_with_those(random):
    answers = numbers(random, 2, 4)
    report = judge(model(tensor(4)), "fp16", [same(answers, (0, 1))], unanswered=["longest"])
    assert report.passed and report.dropped == ("longest",)


def test_overrides_are_told(random):
    limits = ParityLimits(max_error_u=9.0, overridden=("max_error_u",))
    report = judge(model(tensor(4), limits=limits), "fp16", [same(numbers(random, 2, 4), (0, 1))])
    assert report.to_json()["overrides"] == {"max_error_u": 9.0}


def test_a_report_is_json_without_any_infinity(random):
    answers = numbers(random, 12, 4)
    wrong = answers.copy()
    wrong[3, 1], wrong[5, 2] = math.nan, math.inf
    spec = model(tensor(4, kind="logits"))
    samples = tuple(range(12))
    for candidate in (answers.copy(), wrong, answers + np.float32(0.5)):
        report = judge(spec, "bf16", [Trial(samples, {"out": answers}, {"out": candidate})])
        reply = json.loads(json.dumps(report.to_json(), allow_nan=False))
        assert reply["passed"] == report.passed and reply["exact"] == (
            candidate is not wrong and report.passed
        )
    exact = judge(spec, "fp16", [same(answers, samples)]).to_json()
    assert exact["sqnr_db"] is None and exact["exact"] and exact["outputs"][0]["exact"]


def test_rows_that_do_not_fit_in_one_chunk_are_judged_alike(random, monkeypatch):
    answers = numbers(random, 11, 6)
    candidate = (answers * (1 + FP16 * random.uniform(-1, 1, answers.shape))).astype(np.float32)
    at_once = judged(answers, candidate, kind="logits")
    monkeypatch.setattr("halfeven.exporters.gate.trial.CHUNK_ELEMENTS", 13)
    in_parts = judged(answers, candidate, kind="logits")
    assert in_parts.sqnr_db == pytest.approx(at_once.sqnr_db) and in_parts.max_error_u == at_once.max_error_u
    assert in_parts.per_sample_error_u == at_once.per_sample_error_u
