"""The metrics of a version: the known numbers of the field, of graded rows only."""

import numpy as np
import pytest
from halfeven.models.spec.spec import Dim, TensorSpec
from halfeven.serve.finetune.judging.judging_metrics import (
    graded,
    log_odds,
    metrics_of,
    row_values,
)
from halfeven.serve.finetune.judging.redrawn import per_class, value_of

LOGITS = TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="logits")
VALUES = TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="tensor")
SCORES = np.array([[3, 1, 0], [0, 2, 1], [0, 1, 2], [2, 0, 1], [0, 5, 1]], np.float32)
TARGETS = np.array([0, 1, 2, 2, 1])  # the fourth is taken for a 0


def test_the_first_metric_that_fits_an_output_judges_it() -> None:
    assert metrics_of(LOGITS, []) == ("accuracy",) and metrics_of(VALUES, []) == ("mse",)
    assert metrics_of(LOGITS, ["mae", "f1", "accuracy"]) == ("f1", "accuracy")
    assert metrics_of(VALUES, ["f1", "mae"]) == ("mae",)


def test_a_negative_class_and_a_value_that_is_nan_are_not_graded() -> None:
    assert graded(LOGITS, np.array([[0, -1], [-1, -3], [2, 2]])).tolist() == [True, False, True]
    assert graded(VALUES, np.array([[np.nan] * 3, [1, 2, 3], [0.0, np.nan, 1]])).tolist() == [
        False,
        True,
        True,
    ]


def test_classes_by_hand() -> None:
    assert value_of("accuracy", SCORES, TARGETS, 3) == pytest.approx(4 / 5)
    assert per_class("accuracy", SCORES, TARGETS, 3) == pytest.approx([1.0, 1.0, 0.5])
    f1 = [2 / 3, 1.0, 2 / 3]  # 2tp / (2tp + fp + fn)
    assert per_class("f1", SCORES, TARGETS, 3) == pytest.approx(f1)
    assert value_of("f1", SCORES.argmax(-1), TARGETS, 3) == pytest.approx(np.mean(f1))
    softmax = np.exp(SCORES) / np.exp(SCORES).sum(-1, keepdims=True)
    ranked = [
        (own > other) + (own == other) / 2 for own in softmax[2:4, 2] for other in softmax[[0, 1, 4], 2]
    ]
    assert per_class("auroc", softmax, TARGETS, 3)[2] == pytest.approx(np.mean(ranked))


def test_where_no_class_was_chosen_the_row_is_wrong() -> None:
    predicted = np.array([-1, 1, 2, 2, 1])
    assert value_of("accuracy", predicted, TARGETS, 3) == pytest.approx(4 / 5)
    assert per_class("f1", predicted, TARGETS, 3)[0] == 0.0


def test_scores_that_are_nan_are_right_in_no_row_and_have_no_ranking() -> None:
    scores = np.where(np.arange(5)[:, None] == 0, np.float32(np.nan), SCORES)
    assert value_of("accuracy", scores, TARGETS, 3) == pytest.approx(3 / 5)
    assert row_values("accuracy", scores, TARGETS) == pytest.approx([0, 1, 1, 0, 1])
    assert per_class("f1", scores, TARGETS, 3)[0] == 0.0 and np.isnan(value_of("auroc", scores, TARGETS, 3))


def test_of_a_row_whose_targets_are_given_in_part_those_are_graded() -> None:
    predicted, targets = (
        np.array([[1.0, 5.0], [2.0, 3.0], [7.0, 7.0]]),
        np.array([[3.0, np.nan], [2.0, 2.0], [np.nan] * 2]),
    )
    assert (there := graded(VALUES, targets)).tolist() == [True, True, False]
    assert row_values("mse", predicted[there], targets[there]) == pytest.approx([4.0, 0.5])
    assert row_values("mae", predicted[there], targets[there]) == pytest.approx([2.0, 0.5])


def test_a_class_that_the_targets_lack_counts_in_no_mean() -> None:
    targets = np.array([0, 1, 0, 0, 1])
    for metric in ("accuracy", "f1", "auroc"):
        assert per_class(metric, SCORES, targets, 3)[2] is None
    present = per_class("f1", SCORES, targets, 3)[:2]
    assert value_of("f1", SCORES, targets, 3) == pytest.approx(np.mean(np.array(present, float)))
    assert np.isnan(value_of("auroc", SCORES, np.zeros(5, np.int64), 3)), "one class alone has no ranking"


def test_decisions_of_one_row_that_are_not_graded_do_not_count() -> None:
    predicted, targets = np.array([[0, 1], [2, 2]]), np.array([[0, -1], [2, 1]])
    assert value_of("accuracy", predicted, targets, 3) == pytest.approx(2 / 3)
    assert row_values("accuracy", predicted, targets) == pytest.approx([1.0, 0.5])
    assert row_values("f1", predicted, targets) is None


def test_errors_are_means_over_rows_and_elements() -> None:
    random = np.random.default_rng()
    answers, targets = random.standard_normal((2, 7, 3)).astype(np.float32)
    for metric, gaps in (("mse", (answers - targets) ** 2), ("mae", np.abs(answers - targets))):
        assert value_of(metric, answers, targets, 0) == pytest.approx(gaps.mean(), rel=1e-5)
        assert row_values(metric, answers, targets) == pytest.approx(gaps.mean(1), rel=1e-5)


def test_log_odds_are_those_of_the_softmax() -> None:
    logits = 5 * np.random.default_rng().standard_normal((7, 2, 4))
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(log_odds(logits), np.log(shares / (1 - shares)), atol=1e-6)
    infinite, nan = [0.0, -np.inf, -np.inf], [np.nan, 0.0, 1.0]
    np.testing.assert_array_equal(
        log_odds(np.array([infinite, nan])), [[np.inf, -np.inf, -np.inf], [np.nan] * 3]
    )
