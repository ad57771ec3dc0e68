"""F1 and AUROC of many draws at once are those that torchmetrics computes for each draw by itself."""

import numpy as np
import pytest
from halfeven.serve.finetune.judging.judging_metrics import value_of
from halfeven.serve.finetune.judging.redrawn import RARE, of_draws

ROWS, CLASSES, DRAWS = 40, 7, 25


def drawn(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows of each draw, and how often each draw has each row."""
    numbers = random.integers(0, ROWS, (DRAWS, ROWS))
    weights = [np.bincount(one, minlength=ROWS) for one in numbers]
    return numbers, np.stack(weights, 1).astype(np.int32)


@pytest.mark.parametrize("decisions", [(), (3,)])
@pytest.mark.parametrize("metric", ["f1", "auroc"])
def test_each_draw_has_the_value_of_its_rows(metric: str, decisions: tuple[int, ...]) -> None:
    random = np.random.default_rng()
    targets = random.integers(
        -1, CLASSES - 1, (ROWS, *decisions)
    )  # some not graded, the last class in no row
    targets.reshape(ROWS, -1)[:, 0] = np.arange(ROWS) % 3
    scores = random.integers(0, 9, (ROWS, *decisions, CLASSES)) / 9  # with ties
    numbers, weights = drawn(random)
    found = of_draws(metric, scores, targets, CLASSES)(weights)
    expected = [value_of(metric, scores[rows], targets[rows], CLASSES) for rows in numbers]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_classes_of_many_rows_and_of_few_rows_are_counted_alike() -> None:
    random = np.random.default_rng()
    targets = np.concatenate([np.zeros(2 * RARE), np.ones(RARE), np.arange(2, 500)]).astype(np.int64)
    random.shuffle(targets)
    scores = random.integers(0, 99, (len(targets), 500)) / 99
    rows = random.integers(0, len(targets), len(targets))
    weights = np.bincount(rows, minlength=len(targets)).astype(np.int32)[:, None]
    found = of_draws("auroc", scores, targets, 500)(weights)
    assert found[0] == pytest.approx(value_of("auroc", scores[rows], targets[rows], 500), rel=1e-5)


def test_classes_that_were_chosen_give_the_same_f1_as_their_scores_and_none_is_a_wrong_one() -> None:
    random = np.random.default_rng()
    targets, chosen = random.integers(0, CLASSES, (2, ROWS))
    chosen[:5] = -1
    numbers, weights = drawn(random)
    found = of_draws("f1", chosen, targets, CLASSES)(weights)
    expected = [value_of("f1", chosen[rows], targets[rows], CLASSES) for rows in numbers]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_draw_of_one_class_and_scores_that_are_nan_have_no_auroc() -> None:
    targets, scores = np.arange(ROWS) % 2, np.random.default_rng().random((ROWS, 2))
    one_class = np.where(targets == 0, 2, 0).astype(np.int32)[:, None]
    assert np.isnan(of_draws("auroc", scores, targets, 2)(one_class)).all()
    scores[3, 1] = np.nan
    assert np.isnan(of_draws("auroc", scores, targets, 2)(np.ones((ROWS, 1), np.int32))).all()
