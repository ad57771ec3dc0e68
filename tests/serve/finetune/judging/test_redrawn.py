"""F1 and AUROC of many draws at once are those that scikit-learn computes for each draw by itself."""

from typing import Any

import numpy as np
import pytest
from halfeven.serve.finetune.judging.judging_metrics import classes_of
from halfeven.serve.finetune.judging.redrawn import RARE, of_draws, per_class, value_of
from sklearn.metrics import accuracy_score, f1_score, recall_score, roc_auc_score

ROWS, CLASSES, DRAWS = 40, 7, 25


def drawn(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows of each draw, and how often each draw has each row."""
    numbers = random.integers(0, ROWS, (DRAWS, ROWS))
    weights = [np.bincount(one, minlength=ROWS) for one in numbers]
    return numbers, np.stack(weights, 1).astype(np.int32)


def reference(metric: str, predicted: np.ndarray, targets: np.ndarray) -> tuple[float, dict[int, float]]:
    """The metric, and that of each class that the graded targets have."""
    there = targets >= 0
    wanted, scores = targets[there], predicted[there]
    found = classes_of(scores) if scores.ndim > 1 else scores
    labels = np.unique(wanted)
    if metric == "auroc":
        values = [roc_auc_score(wanted == label, scores[:, label]) for label in labels]
    else:
        compute: Any = f1_score if metric == "f1" else recall_score
        values = compute(wanted, found, labels=labels, average=None, zero_division=0)
    mean = accuracy_score(wanted, found) if metric == "accuracy" else np.mean(values)
    return float(mean), dict(zip(labels.tolist(), map(float, values), strict=True))


@pytest.mark.parametrize("decisions", [(), (3,)])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "auroc"])
def test_a_metric_and_its_classes_are_those_of_the_field(metric: str, decisions: tuple[int, ...]) -> None:
    random = np.random.default_rng()
    targets = random.integers(-1, CLASSES - 1, (ROWS, *decisions))
    targets.reshape(ROWS, -1)[:, 0] = np.arange(ROWS) % 3
    scores = random.integers(0, 9, (ROWS, *decisions, CLASSES)) / 9
    mean, classes = reference(metric, scores, targets)
    assert value_of(metric, scores, targets, CLASSES) == pytest.approx(mean)
    found = dict(enumerate(per_class(metric, scores, targets, CLASSES)))
    assert {label: value for label, value in found.items() if value is not None} == pytest.approx(classes)


@pytest.mark.slow
@pytest.mark.parametrize("decisions", [(), (3,)])
@pytest.mark.parametrize("metric", ["f1", "auroc"])
def test_each_draw_has_the_value_of_its_rows(metric: str, decisions: tuple[int, ...]) -> None:
    random = np.random.default_rng()
    # Some not graded, the last class in no row.
    targets = random.integers(-1, CLASSES - 1, (ROWS, *decisions))
    targets.reshape(ROWS, -1)[:, 0] = np.arange(ROWS) % 3
    scores = random.integers(0, 9, (ROWS, *decisions, CLASSES)) / 9  # with ties
    numbers, weights = drawn(random)
    found = of_draws(metric, scores, targets, CLASSES)(weights)
    expected = [reference(metric, scores[rows], targets[rows])[0] for rows in numbers]
    np.testing.assert_allclose(found, expected)


@pytest.mark.slow
def test_classes_of_many_rows_and_of_few_rows_are_counted_alike() -> None:
    random = np.random.default_rng()
    targets = np.concatenate([np.zeros(2 * RARE), np.ones(RARE), np.arange(2, 500)]).astype(np.int64)
    random.shuffle(targets)
    scores = random.integers(0, 99, (len(targets), 500)) / 99
    rows = random.integers(0, len(targets), len(targets))
    weights = np.bincount(rows, minlength=len(targets)).astype(np.int32)[:, None]
    found = of_draws("auroc", scores, targets, 500)(weights)
    assert found[0] == pytest.approx(reference("auroc", scores[rows], targets[rows])[0])


def test_classes_that_were_chosen_give_the_same_f1_as_their_scores_and_none_is_a_wrong_one() -> None:
    random = np.random.default_rng()
    targets, chosen = random.integers(0, CLASSES, (2, ROWS))
    chosen[:5] = -1
    numbers, weights = drawn(random)
    found = of_draws("f1", chosen, targets, CLASSES)(weights)
    expected = [reference("f1", chosen[rows], targets[rows])[0] for rows in numbers]
    np.testing.assert_allclose(found, expected)


def test_a_draw_of_one_class_and_scores_that_are_nan_have_no_auroc() -> None:
    targets, scores = np.arange(ROWS) % 2, np.random.default_rng().random((ROWS, 2))
    one_class = np.where(targets == 0, 2, 0).astype(np.int32)[:, None]
    assert np.isnan(of_draws("auroc", scores, targets, 2)(one_class)).all()
    scores[3, 1] = np.nan
    assert np.isnan(of_draws("auroc", scores, targets, 2)(np.ones((ROWS, 1), np.int32))).all()
