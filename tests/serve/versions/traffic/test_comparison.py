"""Live answers are held to the gate's own rule."""

import math
from dataclasses import replace

import numpy as np
import pytest
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store
from halfeven.serve.versions.traffic.comparison import BOUNDS_U, AnswerComparison, Scale, scale_of

U = 2.0**-11
SPEC = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim())),),
    (TensorSpec("y", "FP32", (Dim(), Dim()), "logits"), TensorSpec("top", "INT64", (Dim(),), "indices")),
    8,
)


def outputs(*rows: list[float], top: list[int] | None = None) -> list[np.ndarray]:
    return [np.array(rows, np.float32), np.array(top or [0] * len(rows), np.int64)]


@pytest.mark.parametrize(("error_u", "is_over"), [(0.0, False), (3.9, False), (4.1, True), (500.0, True)])
def test_an_error_is_measured_in_u_times_the_judged_scale(error_u: float, is_over: bool) -> None:
    comparison = AnswerComparison(SPEC, Scale(U, {"y": 10.0}))
    of_limit = comparison.take(outputs([1.0, 2.0]), outputs([1.0, 2.0 + error_u * U * 10.0]))
    assert (of_limit > 1.0) == is_over
    assert of_limit == pytest.approx(error_u / 4.0, abs=0.01)
    gap = comparison.gaps()["y"]
    assert gap.over == is_over
    assert gap.largest_u == pytest.approx(error_u, abs=0.01)
    assert sum(gap.buckets) == 1
    place = gap.buckets.index(1)
    assert (place == 0 or BOUNDS_U[place - 1] < error_u) and (
        place == len(BOUNDS_U) or error_u <= BOUNDS_U[place]
    )


def test_an_answer_larger_than_any_judged_one_brings_its_own_scale() -> None:
    comparison = AnswerComparison(SPEC, Scale(U, {"y": 1.0}))
    assert comparison.take(outputs([100.0, 0.0]), outputs([100.0, 3 * U * 100.0])) == pytest.approx(
        0.75, abs=0.01
    )


def test_a_nan_that_only_one_of_them_has_is_beyond_any_limit() -> None:
    comparison = AnswerComparison(SPEC, Scale(U, {"y": 1.0}))
    assert comparison.take(outputs([1.0, math.nan]), outputs([1.0, math.nan])) == 0.0
    assert comparison.take(outputs([1.0, 2.0]), outputs([1.0, math.nan])) == math.inf
    assert comparison.take(outputs([1.0, math.inf]), outputs([1.0, 2.0])) == math.inf
    assert comparison.to_json()["y"]["largest_u"] is None
    assert comparison.to_json()["y"]["histogram_u"]["+Inf"] == 2


def test_integers_are_equal_unless_their_proof_found_ties() -> None:
    strict = AnswerComparison(SPEC, Scale(U, {"y": 1.0}))
    assert strict.take(outputs([1.0, 0.0], top=[1]), outputs([1.0, 0.0], top=[2])) == math.inf
    tying = AnswerComparison(SPEC, Scale(U, {"y": 1.0}, frozenset({"top"})))
    assert tying.take(outputs([1.0, 0.0], top=[1]), outputs([1.0, 0.0], top=[2])) == 0.0


def test_changed_first_choices_are_counted() -> None:
    comparison = AnswerComparison(SPEC, Scale(U, {"y": 1.0}))
    comparison.take(outputs([1.0, 0.9], [0.0, 1.0]), outputs([0.9, 1.0], [0.0, 1.0]))
    gap = comparison.gaps()["y"]
    assert (gap.decisions, gap.flipped) == (2, 1)


def test_the_worst_row_of_a_request_counts_once() -> None:
    comparison = AnswerComparison(SPEC, Scale(U, {"y": 1.0}))
    of_limit = comparison.take(outputs([1.0, 0.0], [1.0, 0.0]), outputs([1.0, U], [1.0, 8 * U]))
    assert of_limit == pytest.approx(2.0)
    assert sum(comparison.gaps()["y"].buckets) == 1


def test_the_scale_is_what_the_proof_of_that_form_says(store: Store) -> None:
    scale = scale_of(store.version("net", 1), "torch")
    assert (scale.u, scale.largest, scale.tying) == (U, {"y": 1.0}, frozenset())
    assert scale_of(store.version("net", 1), "onnx") == scale, "without its own report another form's"


def test_the_order_of_the_rows_of_each_request_is_counted() -> None:
    spec = replace(SPEC, outputs=(TensorSpec("y", "FP32", (Dim(), Dim(1, 1)), "score"),))
    comparison = AnswerComparison(spec, Scale(U, {"y": 1.0}))
    scores, none = np.array([[0.9], [0.5], [0.4], [0.1]], np.float32), np.zeros((0, 1), np.float32)
    tied = np.array([[0.9], [0.5], [0.5], [0.1]], np.float32)
    for came in (scores, tied, tied[::-1].copy()):
        comparison.take([scores], [came])
    comparison.take([none], [none])
    found = comparison.to_json()["y"]
    assert (found["pairs"], found["tied"], found["swapped"]) == (18, 2, 5)
    assert "pairs" not in AnswerComparison(SPEC, Scale(U, {})).to_json()["y"]
