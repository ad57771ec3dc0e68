"""Metrics of rows, and F1 and AUROC of many draws of the same rows: what does not depend on the draw is computed once.

A row that was drawn several times counts as often. One draw at a time, a thousand draws of a thousand classes would
take hours.
"""

from collections.abc import Callable, Iterator

import numpy as np

from .judging_metrics import ACCURACY, AUROC, F1, SHARES, decisions, row_values

RARE = 64  # decisions of a class, up to which it is quicker to compare each with all than to sort all
_BLOCK = 256  # decisions that are compared at once

OfDraws = Callable[[np.ndarray], np.ndarray]
"""Takes ``int32 [rows, draws]``, how often each draw has each row; gives ``float64 [draws]``, NaN where a draw has no
value."""
OfClasses = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Takes the same; gives, ``[classes, draws]`` each, the number of decisions that have the class as their target, and
the metric of the class."""


def of_draws(metric: str, predicted: np.ndarray, targets: np.ndarray, classes: int) -> OfDraws:
    """F1 or AUROC, the mean over the classes that the draw has. ``predicted``: classes (−1: none), or scores with the
    classes last; ``targets``: of the same graded rows."""
    _, of = _by_class(metric, predicted, targets, classes)

    def mean(weights: np.ndarray) -> np.ndarray:
        supports, values = of(weights)
        there = supports > 0
        counts = there.sum(0)
        return np.where(counts > 0, (values * there).sum(0) / np.maximum(counts, 1), np.nan)

    return mean


def value_of(metric: str, predicted: np.ndarray, targets: np.ndarray, classes: int) -> float:
    """Any metric over graded rows, each counted once. ``predicted``: values, or as of `of_draws`."""
    if metric == ACCURACY:
        found, wanted, _ = decisions(metric, predicted, targets)
        return float(np.mean(found == wanted))
    if metric in SHARES:
        return float(of_draws(metric, predicted, targets, classes)(_once(targets))[0])
    values = row_values(metric, predicted, targets)
    return float(np.mean(values)) if values is not None else float("nan")


def per_class(metric: str, predicted: np.ndarray, targets: np.ndarray, classes: int) -> list[float | None]:
    """The metric of each class (accuracy: the share of its rows that are right); None where the targets lack it."""
    labels, of = _by_class(metric, predicted, targets, classes)
    supports, values = of(_once(targets))
    found: list[float | None] = [None] * classes
    for label, support, value in zip(labels, supports[:, 0], values[:, 0], strict=True):
        found[label] = float(value) if support else None
    return found


def work_of_a_draw(metric: str, targets: np.ndarray) -> int:
    """The count of the numbers that one draw adds up."""
    there = targets[targets >= 0]
    if metric == F1:
        return there.size
    counts = np.unique(there, return_counts=True)[1]
    rare = int(counts[counts <= RARE].sum())
    return there.size * (int((counts > RARE).sum()) + -(-rare // RARE))


def size_of_a_draw(targets: np.ndarray, classes: int) -> int:
    """The count of the numbers that one draw has in memory at once."""
    return targets.size + classes + _BLOCK


def _once(targets: np.ndarray) -> np.ndarray:
    """A draw that has each row once."""
    return np.ones((len(targets), 1), np.int32)


def _by_class(
    metric: str, predicted: np.ndarray, targets: np.ndarray, classes: int
) -> tuple[np.ndarray, OfClasses]:
    """The classes, and a metric of each."""
    found, wanted, row = decisions(metric, predicted, targets)
    if metric == AUROC:
        return _auroc(found, wanted, row)
    return np.arange(classes), _counted(metric, found, wanted, row, classes)


def _counted(metric: str, found: np.ndarray, wanted: np.ndarray, row: np.ndarray, classes: int) -> OfClasses:
    """Accuracy: tp / (tp + fn). F1: 2tp / (2tp + fp + fn)."""
    right = found == wanted

    def of(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = weights[row]
        supports = _sums(drawn, wanted, classes)
        hits = _sums(drawn[right], wanted[right], classes)
        if metric == ACCURACY:
            return supports, hits / np.maximum(supports, 1)
        both = supports + _sums(drawn, found + 1, classes + 1)[1:]  # the first: where no class was chosen
        return supports, 2.0 * hits / np.maximum(both, 1)

    return of


def _sums(drawn: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """``int64 [classes, draws]``: the weights of the decisions with each label."""
    sums = np.zeros((classes, drawn.shape[1]), np.int64)
    order = np.argsort(labels, kind="stable")
    there, starts = np.unique(labels[order], return_index=True)
    if len(there):
        sums[there] = np.add.reduceat(drawn[order], starts, axis=0, dtype=np.int64)
    return sums


def _auroc(scores: np.ndarray, wanted: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, OfClasses]:
    """The classes of the targets, and for each the share of (its row, another row) in which its own has the larger
    score, a tie counting half: the sum of mid-ranks (Mann and Whitney). NaN where a draw has one class alone."""
    labels, counts = np.unique(wanted, return_counts=True)
    if np.isnan(scores).any():  # it would be ranked as if it were a number
        return labels, lambda weights: (
            np.ones((len(labels), weights.shape[1]), np.int64),
            np.full((len(labels), weights.shape[1]), np.nan),
        )
    frequent, rare = labels[counts > RARE], labels[counts <= RARE]
    parts = [_Sorted(scores[:, label], wanted == label) for label in frequent]
    blocks = [_Compared(scores, wanted, block) for block in _blocks(rare, wanted)]

    def of(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drawn = weights[row]
        total = drawn.sum(0, dtype=np.int64)
        found = [part.pairs(drawn) for part in (*parts, *blocks)]
        supports, pairs = (np.concatenate(each) for each in zip(*found, strict=True))
        pairs = pairs - 0.5 * supports.astype(np.float64) ** 2  # without those among a class's own
        areas = pairs / np.maximum(supports * (total - supports), 1)
        return supports, np.where((supports > 0).sum(0) > 1, areas, np.nan)

    return np.concatenate([frequent, rare]), of


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
        """The numbers of `_Sorted.pairs`, ``[classes, draws]`` each."""
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
