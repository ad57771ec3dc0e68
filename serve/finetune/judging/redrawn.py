"""F1 and AUROC of many draws of the same rows: what does not depend on the draw is computed once.

For a row that was drawn several times they equal the means over classes of `judging_metrics.py`, which torchmetrics
computes for one set of rows; it would take hours for a thousand draws of a thousand classes.
"""

from collections.abc import Callable, Iterator

import numpy as np

from .judging_metrics import F1, decisions

RARE = 64  # decisions of a class, up to which it is quicker to compare each with all than to sort all
_BLOCK = 256  # decisions that are compared at once

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
    if metric == F1:
        return there.size
    counts = np.unique(there, return_counts=True)[1]
    rare = int(counts[counts <= RARE].sum())
    return there.size * (int((counts > RARE).sum()) + -(-rare // RARE))


def size_of_a_draw(targets: np.ndarray, classes: int) -> int:
    """How many of them are in memory at once."""
    return targets.size + classes + _BLOCK


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
    labels, counts = np.unique(wanted, return_counts=True)
    parts = [_Sorted(scores[:, label], wanted == label) for label in labels[counts > RARE]]
    blocks = [_Compared(scores, wanted, block) for block in _blocks(labels[counts <= RARE], wanted)]

    def of(weights: np.ndarray) -> np.ndarray:
        drawn = weights[row]
        total = drawn.sum(0, dtype=np.int64)
        found = [part.pairs(drawn) for part in (*parts, *blocks)]
        supports, pairs = (np.concatenate(each) for each in zip(*found, strict=True))
        pairs = pairs - 0.5 * supports.astype(np.float64) ** 2  # without those among a class's own
        areas = pairs / np.maximum(supports * (total - supports), 1)
        several = (supports > 0).sum(0) > 1
        return np.where(several, _mean_where(supports > 0, areas), np.nan)

    return of


class _Sorted:
    """A class of many decisions: all decisions in the order of the class's scores, and how many of them are below and
    how many at most each score of its own."""

    def __init__(self, scores: np.ndarray, own: np.ndarray) -> None:
        self._order = np.argsort(scores, kind="stable")
        self._own = np.flatnonzero(own)
        ordered = scores[self._order]
        self._below, self._upto = (np.searchsorted(ordered, scores[own], side) for side in ("left", "right"))

    def pairs(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``[1, draws]`` each: the weight of the class, and the sum of (its weight, weight below and half of that at)
        over its decisions."""
        sums = np.zeros((len(drawn) + 1, drawn.shape[1]), np.int32)
        np.cumsum(drawn[self._order], axis=0, out=sums[1:])
        mine = drawn[self._own]
        middle = (sums[self._below] + sums[self._upto]) * 0.5
        return mine.sum(0, dtype=np.int64)[None], (mine * middle).sum(0)[None]


class _Compared:
    """Classes of few decisions each: every one of these is compared with all decisions, by one product of matrices."""

    def __init__(self, scores: np.ndarray, wanted: np.ndarray, own: np.ndarray) -> None:
        self._scores, self._own, self._labels = scores, own, wanted[own]
        self._starts = np.unique(self._labels, return_index=True)[1]

    def pairs(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `_Sorted.pairs`, ``[classes, draws]`` each."""
        scores = self._scores[:, self._labels]
        mine = scores[self._own, np.arange(len(self._own))]
        before = (scores < mine).astype(np.float32) + (scores == mine).astype(np.float32) / 2
        weights = drawn[self._own]
        middle = before.T @ drawn.astype(np.float32)
        supports = np.add.reduceat(weights, self._starts, axis=0, dtype=np.int64)
        return supports, np.add.reduceat(weights * middle.astype(np.float64), self._starts, axis=0)


def _blocks(labels: np.ndarray, wanted: np.ndarray) -> Iterator[np.ndarray]:
    """The decisions of these classes, class by class, in blocks of whole classes."""
    order = np.argsort(wanted, kind="stable")
    block: list[np.ndarray] = []
    for label in labels:
        low, high = (np.searchsorted(wanted[order], label, side) for side in ("left", "right"))
        block.append(order[low:high])
        if sum(map(len, block)) > _BLOCK - RARE:
            yield np.concatenate(block)
            block = []
    if block:
        yield np.concatenate(block)


def _mean_where(there: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of each column over the classes that are ``there``; NaN where none is."""
    counts = there.sum(0)
    return np.where(counts > 0, (values * there).sum(0) / np.maximum(counts, 1), np.nan)
