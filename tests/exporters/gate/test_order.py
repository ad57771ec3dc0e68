"""Claims about order: what a half may do to a ranking, and what FP32 itself cannot tell is not asked of it."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from halfeven.exporters.gate.order import MAX_PAIRS, measure_order
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge, judge_output
from halfeven.exporters.gate.rejudge import rejudge
from halfeven.exporters.gate.rule_verdicts import OrderVerdict
from halfeven.exporters.gate.trial import Pair, Trial
from halfeven.exporters.gate.verdict import OutputVerdict
from halfeven.exporters.report.gate_rows import gate_rows
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec

U = UNIT_ROUNDOFF["fp16"]
Answer = np.ndarray


def spec(answers: Answer, kind: str) -> TensorSpec:
    return TensorSpec("y", "FP32", (Dim(), *(Dim(size, size) for size in answers.shape[1:])), kind)


def pair(original: Answer, half: Answer, first: int = 0) -> Pair:
    return Pair(
        tuple(range(first, first + len(original))), original.astype(np.float32), half.astype(np.float32)
    )


def judged(original: Answer, half: Answer, kind: str = "score", **limits: float) -> OutputVerdict:
    held = replace(ParityLimits(), **limits)
    return judge_output(spec(original, kind), [pair(original, half)], held, "fp16")


def order_of(*pairs: Pair, kind: str = "score") -> OrderVerdict:
    found = measure_order(kind, pairs, U)
    assert found is not None
    return found


def rules(verdict: OutputVerdict) -> list[str]:
    return [failure.rule for failure in verdict.failures]


def as_half(array: Answer) -> Answer:
    return array.astype(np.float32).astype(np.float16).astype(np.float32)


def sigmoid(logits: Answer) -> Answer:
    return 1.0 / (1.0 + np.exp(-logits))


def spread_evenly(rows: int = 200) -> Answer:
    """Numbers from 0 to 1 at equal distances, in random order."""
    return np.random.default_rng().permutation(rows) / (rows - 1)


def swapped(scores: Answer, distance_u: float) -> Answer:
    """Two candidates that are adjacent in the ranking change places, having been moved ``distance_u`` apart."""
    one, other = np.argsort(scores)[100:102]
    spread = np.subtract(*np.percentile(scores, (95, 5)))
    scores[other] = scores[one] + distance_u * U * spread
    moved = scores.copy()
    moved[[one, other]] = scores[[other, one]]
    return moved


# Ties


@pytest.mark.parametrize("kind", ["score", "probabilities"])
def test_a_saturated_head_passes_every_other_rule_and_is_refused_for_its_ties(random, kind):
    original = sigmoid(random.uniform(6, 13, (100, 1)))
    verdict = judged(original, as_half(original), kind)
    assert "ties" in rules(verdict) and set(rules(verdict)) <= {"ties", "top10"}
    assert verdict.max_error_u < 1 and verdict.sqnr_db > 70
    assert "keep the head behind it in FP32" in verdict.failures[0].message


def test_the_same_answers_are_no_matter_for_another_kind(random):
    original = sigmoid(random.uniform(6, 13, (100, 1)))
    verdict = judged(original, as_half(original), "tensor")
    assert verdict.passed and verdict.order is None


def test_scores_around_zero_in_half_are_told_apart(random):
    original = random.standard_normal(500)
    verdict = judged(original, as_half(original))
    assert verdict.passed and verdict.order is not None
    assert 0 < verdict.order.tied <= 0.001 * verdict.order.pairs


def test_one_tie_among_few_pairs_says_nothing_of_a_share_and_two_do(random):
    original = np.sort(random.uniform(1, 2, 16))
    half = original.copy()
    half[4] = half[5]
    assert judged(original, half, max_error_u=1e6, min_sqnr_db=0.0, max_swaps=1.0).passed
    assert "ties" in rules(judged(original, half, max_error_u=1e6, max_ties=0.0))
    half[8] = half[9]
    assert "ties" in rules(judged(original, half, max_error_u=1e6))


def test_equal_scores_of_the_original_are_no_pair_of_a_ranking():
    same = np.full(50, 0.25)
    found = order_of(pair(same, same))
    assert (found.pairs, found.tied, found.swapped, found.top10_overlap) == (0, 0, 0, 1.0)
    assert judged(same, same).passed


# FP32's own noise


def test_what_fp32_itself_answers_otherwise_in_another_batch_is_not_held_apart():
    """The original's noise is as large as the steps between its scores: whatever the half says, it cannot be wrong."""
    steps = np.arange(32) * 1e-4 + 1.0
    noisy = steps + 2e-3
    small = pair(noisy[:12], noisy[:12])
    found = order_of(small, pair(steps, steps[::-1].copy()))
    assert found.swapped == 0
    assert order_of(pair(steps, steps[::-1].copy())).swapped > 400, "and without noise all of it is wrong"


def test_an_original_in_another_order_of_sums_passes_as_its_own_half(random):
    weights, inputs = random.standard_normal(256).astype(np.float32), random.standard_normal((300, 256))
    inputs = inputs.astype(np.float32)
    one, other = inputs @ weights, (inputs[:, ::-1] @ weights[::-1]).astype(np.float32)
    assert not np.array_equal(one, other)
    assert judged(one, other).passed


def test_the_last_places_of_fp32_are_nobody_s_order():
    original = np.float32(1.0) + np.arange(20, dtype=np.float32) * np.float32(2.0**-23)
    assert order_of(pair(original, np.ones(20))).tied == 17 * 18 // 2, "from three units in the last place on"


# Swaps


@pytest.mark.parametrize(("distance_u", "held"), [(3.9, True), (4.1, False), (100.0, False)])
def test_two_that_change_places_must_be_closer_than_4u_of_the_spread(distance_u, held):
    original = spread_evenly()
    half = swapped(original, distance_u)
    verdict = judged(original, half, max_error_u=1e6, min_sqnr_db=0.0)
    assert ("swaps" not in rules(verdict)) == held
    assert verdict.order is not None and verdict.order.swap_u >= distance_u * 0.99


@pytest.mark.parametrize(("scale", "shift"), [(1e-6, 0.0), (1e6, 0.0), (1.0, 100.0)])
def test_the_spread_counts_and_not_the_size_of_the_scores(scale, shift):
    original = spread_evenly()
    for distance_u, swaps in ((3.0, 0), (6.0, 1)):
        half = swapped(original, distance_u)
        sides = (scale * side + shift for side in (original, half))
        one, other = (np.asarray(side, np.float64) for side in sides)
        found = measure_order("score", [Pair(tuple(range(200)), one, other)], U)
        assert found is not None and found.swapped == swaps


# The ten best


def test_ties_among_the_best_alone_are_too_few_for_a_share_and_lose_the_best():
    original = np.linspace(0, 1, 300)
    half = original.copy()
    half[-13:] = 1.5  # 78 of 44,850 pairs
    verdict = judged(original, half, max_error_u=1e6, min_sqnr_db=0.0, max_ties=0.01, max_swaps=1.0)
    assert rules(verdict) == ["top10"]
    assert verdict.order is not None and verdict.order.top10_overlap == 0.7


def test_among_ten_samples_there_are_no_ten_best():
    original = spread_evenly(10)
    assert order_of(pair(original, original)).top10_overlap is None
    assert order_of(pair(spread_evenly(11), spread_evenly(11))).top10_overlap is not None


# The answers that are ranked


def test_each_run_over_the_samples_is_judged_by_itself(random):
    """ONNX Runtime's CPU computes half in FP32: its answers must not hide what the storage says, before or after."""
    original = sigmoid(random.uniform(6, 13, 64))
    storage, runtime = pair(original, as_half(original)), pair(original, original)
    alone = order_of(storage)
    for several in ((storage, runtime), (runtime, storage)):
        found = order_of(*several)
        assert (found.tied, found.top10_overlap) == (alone.tied, alone.top10_overlap)
    assert order_of(runtime).tied == 0


def test_small_batches_before_the_large_ones_change_nothing(random):
    original = random.standard_normal(40)
    half = as_half(original)
    small = [pair(original[i : i + 2], half[i : i + 2], i) for i in range(0, 8, 2)]
    bulk = [pair(original[i : i + 8], half[i : i + 8], i) for i in range(0, 40, 8)]
    assert order_of(*small, *bulk) == order_of(*bulk)


def test_a_model_that_takes_one_row_at_a_time_is_ranked_over_its_samples(random):
    one = ModelSpec("m", (TensorSpec("x", "FP32", (Dim(3, 3),)),), (TensorSpec("y", "FP32", (), "score"),), 0)
    original = sigmoid(random.uniform(6, 13, 50)).astype(np.float32)
    trials = [Trial((i,), {"y": score}, {"y": as_half(score)}) for i, score in enumerate(original)]
    (output,) = judge(one, "fp16", trials).outputs
    assert "ties" in rules(output) and output.order is not None and output.order.rows == 50


def test_however_many_samples_there_are_the_pairs_have_a_bound(random):
    found = order_of(pair(original := random.standard_normal(5000), original))
    assert MAX_PAIRS // 2 < found.pairs <= MAX_PAIRS and found.rows == 5000
    classes = random.random((2000, 40))
    found = order_of(pair(classes, classes), kind="probabilities")
    assert found.lists == 16 and found.pairs <= MAX_PAIRS


def test_what_is_no_number_in_the_original_is_not_ranked(random):
    original = random.standard_normal(30)
    original[3], original[5], original[7] = np.nan, np.inf, -3.4e38
    assert order_of(pair(original, original)).pairs == 27 * 26 // 2


# Probabilities of several classes


def test_of_two_classes_that_which_saturates_is_seen_in_its_own_column(random):
    likely = sigmoid(random.uniform(6, 13, 100))
    original = np.stack([likely, 1 - likely], -1)
    assert "ties" in rules(judged(original, as_half(original), "probabilities"))


def test_a_class_among_many_that_is_not_there_is_not_ranked(random):
    """Below half's smallest normal number a probability of one class among ten counts as that number."""
    logits = random.standard_normal((200, 10)) + 20 * np.eye(10)[random.integers(0, 10, 200)]
    original = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert order_of(pair(original, original), kind="probabilities").pairs < 1e5
    half = np.where(original < 2.0**-16, 0.0, original)
    assert order_of(pair(original, half), kind="probabilities").tied == 0


def test_the_few_rows_of_a_rare_class_err_with_their_own_size(random):
    original = np.full((200, 3), 1 / 3)
    original[:, 0] = 1e-3 * random.uniform(0.9, 1.1, 200)
    original[:4, 0] = 0.5, 0.5005, 0.6, 0.7
    half = original.copy()
    half[:2, 0] = original[1::-1, 0]
    assert order_of(pair(original, half), kind="probabilities").swapped == 0
    half[:, 0] = original[:, 0]
    half[2:4, 0] = original[3:1:-1, 0]
    assert order_of(pair(original, half), kind="probabilities").swapped == 1


# Embeddings


def vectors(random: np.random.Generator, rows: int = 60) -> Answer:
    return random.standard_normal((rows, 24))


def test_a_half_of_an_embedding_keeps_the_order_of_its_similarities(random):
    original = vectors(random)
    verdict = judged(original, as_half(original), "embedding")
    assert verdict.passed and verdict.order is not None
    assert verdict.order.lists == 16 and verdict.order.rows == 60 and verdict.order.pairs > 20_000


def test_vectors_that_fall_together_tie_and_those_that_vanish_too(random):
    original = vectors(random)
    for end in (original[:1], np.zeros((1, 24))):
        half = original.copy()
        half[:10] = end
        assert "ties" in rules(judged(original, half, "embedding", max_error_u=1e6, min_sqnr_db=0.0))


def test_a_narrow_cone_is_ranked_within_its_own_spread(random):
    """All cosines are above 0.99: errors that are nothing beside 1 destroy the order."""
    original = 20.0 + vectors(random)
    half = original + 0.03 * vectors(random)
    verdict = judged(original, half, "embedding")
    assert verdict.max_error_u < 16 and {"swaps"} <= set(rules(verdict))


def test_only_directions_are_ranked(random):
    original = vectors(random)
    lengths = random.uniform(0.5, 2.0, (60, 1))
    found = order_of(pair(original, original * lengths), kind="embedding")
    assert (found.tied, found.swapped) == (0, 0)


def test_many_vectors_take_no_memory_for_each_pair_of_them(random):
    original = random.standard_normal((6000, 2))
    tracemalloc.start()
    order_of(pair(original, original), pair(original, original), kind="embedding")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < len(original) ** 2 * 8, "bytes of one array with a number for each pair"


def test_each_position_of_an_embedding_of_tokens_is_ranked_by_itself(random):
    original = random.standard_normal((20, 5, 8))
    half = original.copy()
    half[:, 4] = 1.0
    found = order_of(pair(original, half), kind="embedding")
    assert 0.2 * found.pairs < found.tied < 0.3 * found.pairs


@pytest.mark.parametrize("kind", ["score", "probabilities", "embedding"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (3, 0), (1,), (2,)])
def test_of_too_little_nothing_is_said(kind, shape, random):
    original = random.random(shape).astype(np.float32)
    verdict = judged(original, original.copy(), kind)
    assert "ties" not in rules(verdict) and "swaps" not in rules(verdict) and "top10" not in rules(verdict)


# Limits and the report


def trial(original: Answer, half: Answer) -> Sequence[Trial]:
    one, other = ({"y": side.astype(np.float32)} for side in (original, half))
    return [Trial(tuple(range(len(original))), one, other)]


def test_an_override_accepts_the_order_and_stands_in_the_report(random):
    original = sigmoid(random.uniform(6, 8, (100, 1)))
    half = as_half(original)
    one = ModelSpec("m", (TensorSpec("x", "FP32", (Dim(),)),), (spec(original, "score"),))
    refused = judge(one, "fp16", trial(original, half))
    assert {f.rule for f in refused.all_failures} == {"ties", "top10"}
    limits = ParityLimits(max_ties=1.0, min_top10_overlap=0.0, overridden=("max_ties", "min_top10_overlap"))
    accepted = judge(replace(one, parity=limits), "fp16", trial(original, half))
    assert accepted.passed
    assert accepted.to_json()["overrides"] == {"max_ties": 1.0, "min_top10_overlap": 0.0}
    assert rejudge(refused.to_json(), limits).to_json() == accepted.to_json()
    assert rejudge(accepted.to_json(), ParityLimits()).to_json() == refused.to_json()


def test_the_gate_s_table_counts_pairs_and_says_when_they_are_too_few():
    few, many = spread_evenly(16), spread_evenly(200)  # drawn ones hold pairs that FP32 cannot tell apart
    for original, words in ((few, "0 of 120 (too few to show 0.1 %)"), (many, "0 of 19900")):
        shown = {row.rule: row for row in gate_rows(judged(original, original).to_json())}
        assert shown["pairs distinct in FP32 that tie"].found == words
        assert all(row.held for row in shown.values()) and "ten best kept" in shown
