"""F1 and AUROC of many draws of the same rows: what does not depend on the draw is computed once.

For a row that was drawn several times they equal the means over classes of `judging_metrics.py`, which torchmetrics
computes for one set of rows; it would take hours for a thousand draws of a thousand classes.
"""

from collections.abc import Callable

import numpy as np

from .judging_metrics import F1, decisions

OfDraws = Callable[[np.ndarray], np.ndarray]
"""Takes ``int32 [rows, draws]``, how often each draw has each row; gives ``float64 [draws]``, NaN where a draw has no
value."""


def of_draws(metric: str, predicted: np.ndarray, targets: np.ndarray, classes: int) -> OfDraws:
    """F1 or AUROC. ``predicted`` and ``targets`` are of graded rows, as in `judging_metrics.value_of`."""
    found, wanted, row = decisions(metric, predicted, targets, classes)
    if metric == F1:
        return _f1(found, wanted, row, classes)
    return _auroc(found, wanted, row)


def work_of_a_draw(metric: str, targets: np.ndarray) -> int:
    """How many numbers one draw adds up."""
    there = targets[targets >= 0]
    return there.size * (1 if metric == F1 else len(np.unique(there)))


def _f1(found: np.ndarray, wanted: np.ndarray, row: np.ndarray, classes: int) -> OfDraws:
    """2tp / (2tp + fp + fn) of each class that the draw has, and their mean."""

    def of(weights: np.ndarray) -> np.ndarray:
        drawn = weights[row]
        supports = _sums(drawn, wanted, classes)
        both = supports + _sums(drawn, found, classes)
        right = found == wanted
        shares = 2.0 * _sums(drawn[right], wanted[right], classes) / np.maximum(both, 1)
        return _mean_where(supports > 0, shares)

    return of


def _sums(drawn: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """``int64 [classes, draws]``: the weights of the decisions with each label."""
    sums = np.zeros((classes, drawn.shape[1]), np.int64)
    order = np.argsort(labels, kind="stable")
    there, starts = np.unique(labels[order], return_index=True)
    if len(there):
        sums[there] = np.add.reduceat(drawn[order], starts, axis=0, dtype=np.int64)
    return sums


def _auroc(scores: np.ndarray, wanted: np.ndarray, row: np.ndarray) -> OfDraws:
    """For each class the share of (its row, another row) in which its own has the larger score, a tie counting half:
    the sum of mid-ranks (Mann and Whitney). The mean over the classes that the draw has."""
    if np.isnan(scores).any():
        return lambda weights: np.full(weights.shape[1], np.nan)
    ranked = [_ranked(scores[:, label], wanted == label) for label in np.unique(wanted)]

    def of(weights: np.ndarray) -> np.ndarray:
        drawn = weights[row]
        total = drawn.sum(0, dtype=np.int64)
        supports, areas = (np.zeros((len(ranked), drawn.shape[1])) for _ in range(2))
        for place, (order, own, low, high) in enumerate(ranked):
            below = np.zeros((len(order) + 1, drawn.shape[1]), np.int32)
            np.cumsum(drawn[order], axis=0, out=below[1:])
            mine = drawn[own]
            supports[place] = support = mine.sum(0, dtype=np.int64)
            middle = (below[low] + below[high]) * 0.5  # weights below each own score, half of its ties
            pairs = (mine * middle).sum(0) - 0.5 * support.astype(
                np.float64
            ) ** 2  # without those among its own
            areas[place] = pairs / np.maximum(support * (total - support), 1)
        several = (supports > 0).sum(0) > 1
        return np.where(several, _mean_where(supports > 0, areas), np.nan)

    return of


def _ranked(scores: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, ...]:
    """The order of all decisions by a class's scores, the decisions of the class, and how many scores are below and how
    many at most each of theirs."""
    order = np.argsort(scores, kind="stable")
    places = np.flatnonzero(own)
    low, high = (np.searchsorted(scores[order], scores[places], side) for side in ("left", "right"))
    return order, places, low, high


def _mean_where(there: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of each column over the classes that are ``there``; NaN where none is."""
    counts = there.sum(0)
    return np.where(counts > 0, (values * there).sum(0) / np.maximum(counts, 1), np.nan)
