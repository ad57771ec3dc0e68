"""Order is an answer too: what a half does to the ranking of the judged samples.

One list of values is ranked for each place of the output: of ``score`` its one number a row; of ``probabilities``
each class (and position), over the rows; of ``embedding`` the cosine similarities of the other samples to one anchor
sample. An error that is small beside the largest score can still destroy a ranking: that lives in the *spread* of a
list, from its 5th to its 95th percentile.

Two values of the original are distinct where they are further apart than the original's own noise: twice what its
answers to the same sample differ by at other batch sizes, and at least two units in the last place of FP32. Only
distinct pairs are judged. The allowed error is 4u of the spread. Of one class among more than two it is 4u of a value's
distance from the median where that is larger: the few rows that have a rare class lie outside of the percentiles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .divergence import left_out
from .rule_verdicts import OrderVerdict
from .trial import Pair

KINDS = ("score", "probabilities", "embedding")
ALLOWED_U = 4.0
MAX_PAIRS = 1 << 19  # of all lists together
MAX_LISTS = 16  # classes or anchors, evenly taken
MAX_OF_NOISE = 2048  # rows, evenly taken, whose similarities to each other tell the noise
MAX_POSITIONS = 4  # of an embedding with several vectors a sample
BEST = 10
LAST_PLACES = 2.0**-22  # of the largest value of a list
SMALLEST_NORMAL = 2.0**-14  # of FP16: a smaller probability of one class among many counts as this one
SAME_COSINE = 12  # decimals: cosines of equal vectors may differ in the last place of FP64

Run = Mapping[int, tuple[np.ndarray, np.ndarray]]  # sample → the original's row, the half's row


@dataclass(frozen=True, slots=True)
class _List:
    """One list of values to rank, [rows] FP64, and the distance below which FP32 cannot tell two values apart.

    ``rare``: those that count may be few, as of one class among many.
    """

    reference: np.ndarray
    candidate: np.ndarray
    noise: float
    rare: bool = False


def measure_order(kind: str, pairs: Sequence[Pair], u: float) -> OrderVerdict | None:
    """Ties, swaps and best ten of one output, without limits (`parity.py` adds them); None for a kind without order.

    The runs over all samples are judged each for itself (an ONNX half answers with its runtime and with its storage),
    and the worst counts; what the original answers in the others tells its noise. NaN, infinities and sentinels of the
    original are left out.
    """
    runs = _runs([pair for pair in pairs if pair.samples]) if kind in KINDS else []
    if not runs:
        return None
    most = max(map(len, runs))
    rankings = _similarities if kind == "embedding" else _columns
    found: list[OrderVerdict] = []
    for run in (run for run in runs if len(run) == most):
        others = [other for other in runs if other is not run]
        found.append(_pooled(most, [_compared(one, u) for one in rankings(run, others, kind)]))
    return _worst(found)


def _runs(pairs: Sequence[Pair]) -> list[Run]:
    """The runs, divided where an execution begins with a sample of the run; others may fill up the last batch."""
    runs: list[dict[int, tuple[np.ndarray, np.ndarray]]] = []
    for pair in pairs:
        if not runs or any(sample in runs[-1] for sample in pair.samples[:1]):
            runs.append({})
        rows = zip(pair.reference, pair.candidate, strict=True)
        runs[-1].update(zip(pair.samples, rows, strict=True))
    return list(runs)


# The lists that are ranked.


def _columns(run: Run, others: Sequence[Run], kind: str) -> Iterator[_List]:
    """One list for each place of a row."""
    original, half = _stacked(run, 0), _stacked(run, 1)
    classes = original.shape[-1] if kind == "probabilities" and original.ndim > 1 else 1
    original, half = (side.reshape(len(side), side[0].size) for side in (original, half))
    noise = np.zeros(original.shape[1])
    for other in others:
        mine, theirs = _both(run, other)
        gap = _finite_gap(mine, theirs).reshape(len(mine), original.shape[1])
        noise = np.maximum(noise, gap.max(axis=0, initial=0.0))
    places = _evenly(original.shape[1], MAX_LISTS)
    rows = _evenly(len(original), _rows_for(len(places)))
    for place in places:
        pair = original[rows, place], half[rows, place]
        if many := classes > 2:
            pair = np.maximum(pair[0], SMALLEST_NORMAL), np.maximum(pair[1], SMALLEST_NORMAL)
        yield _list(*pair, float(noise[place]), many)


def _similarities(run: Run, others: Sequence[Run], kind: str) -> Iterator[_List]:
    """One list for each anchor (and position): its similarities to the other samples."""
    original, half = _vectors(_stacked(run, 0)), _vectors(_stacked(run, 1))
    positions = _evenly(original.shape[1], MAX_POSITIONS)
    anchors = _evenly(len(original), MAX_LISTS // max(len(positions), 1))
    rows = _evenly(len(original), _rows_for(len(anchors) * len(positions)))
    for position in positions:
        noise = 0.0
        for other in others:
            both = (_vectors(one)[:, position] for one in _both(run, other))
            mine, theirs = (one[_evenly(len(one), MAX_OF_NOISE)] for one in both)
            gap = _finite_gap(_cosines(mine, mine), _cosines(theirs, theirs))
            noise = max(noise, float(gap.max(initial=0.0)))
        left, right = original[:, position], half[:, position]
        ranked = _cosines(left[anchors], left[rows]), _cosines(right[anchors], right[rows])
        for anchor, one, other in zip(anchors, *ranked, strict=True):
            yield _list(one[rows != anchor], other[rows != anchor], noise)


def _list(reference: np.ndarray, candidate: np.ndarray, noise: float, rare: bool = False) -> _List:
    usable = ~left_out(reference)
    # A vector without a direction is similar to none.
    reference, candidate = reference[usable], np.nan_to_num(candidate[usable])
    own = LAST_PLACES * float(np.abs(reference).max(initial=0.0))
    return _List(reference, candidate, max(2 * noise, own), rare)


def _stacked(run: Run, side: int) -> np.ndarray:
    """The rows in the samples' order, FP64; only those of the first one's shape (a free axis may differ)."""
    rows = [run[sample] for sample in sorted(run)]
    shape = rows[0][0].shape
    return np.stack([np.asarray(row[side], np.float64) for row in rows if row[0].shape == shape])


def _both(run: Run, other: Run) -> tuple[np.ndarray, np.ndarray]:
    """The original's answers to the samples that both runs have."""
    shape = run[min(run)][0].shape
    common = [s for s in sorted(run.keys() & other.keys()) if run[s][0].shape == other[s][0].shape == shape]
    mine, theirs = ([np.asarray(one[s][0], np.float64) for s in common] for one in (run, other))
    return np.array(mine).reshape(len(common), *shape), np.array(theirs).reshape(len(common), *shape)


def _vectors(rows: np.ndarray) -> np.ndarray:
    """The rows' vectors, as an array [rows, positions, width]."""
    width = rows.shape[-1] if rows.ndim > 1 else 1
    return rows.reshape(len(rows), rows[0].size // max(width, 1) if len(rows) else 0, width)


def _cosines(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The cosine similarities [some, others]; NaN for a vector of zeros, or one that is not finite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        lengths = np.linalg.norm(some, axis=1)[:, None] * np.linalg.norm(others, axis=1)
        return np.round(some @ others.T / lengths, SAME_COSINE)


def _finite_gap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        gap = np.abs(one - other)
    return np.where(np.isfinite(gap), gap, 0.0)


def _evenly(count: int, most: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def _rows_for(lists: int) -> int:
    """The number of rows that may be ranked in each of so many lists."""
    return int((1 + np.sqrt(1 + 8 * MAX_PAIRS / max(lists, 1))) / 2)


# The judgement of one ranking.


@lru_cache(maxsize=8)
def _every_pair(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(rows, 1)


def _compared(one: _List, u: float) -> OrderVerdict:
    original, half = one.reference, one.candidate
    if len(original) < 2:
        return OrderVerdict()
    low, median, high = np.percentile(original, (5, 50, 95))
    scale = np.maximum(high - low, np.abs(original - median) if one.rare else 0.0) * np.ones(len(original))
    first, second = _every_pair(len(original))
    gap, came = original[first] - original[second], half[first] - half[second]
    size = np.abs(gap)
    distinct = size > one.noise
    unit = np.maximum(scale[first], scale[second])
    apart = size > np.maximum(ALLOWED_U * u * unit, one.noise)
    changed = distinct & (came != 0) & ((gap > 0) != (came > 0))
    return OrderVerdict(
        lists=1,
        pairs=int(distinct.sum()),
        tied=int((distinct & (came == 0)).sum()),
        apart=int(apart.sum()),
        swapped=int((changed & apart).sum()),
        swap_u=float((size[changed] / np.maximum(unit[changed], one.noise)).max(initial=0.0)) / u,
        top10_overlap=_best_kept(one, np.maximum(ALLOWED_U * u * scale, one.noise)),
    )


def _best_kept(one: _List, allowed: np.ndarray) -> float | None:
    """The share of the half's ten best that are no further below the original's tenth than allowed.

    Of values that tie in the half the original's lesser ones count as ranked first: nothing says that they are not.
    """
    original = one.reference
    if len(original) <= BEST:
        return None
    tenth = np.argsort(-original, kind="stable")[BEST - 1]
    best = np.lexsort((original, -one.candidate))[:BEST]
    return int((original[best] >= original[tenth] - allowed[tenth]).sum()) / BEST


def _pooled(rows: int, lists: Sequence[OrderVerdict]) -> OrderVerdict:
    return OrderVerdict(
        rows=rows,
        lists=sum(one.lists for one in lists),
        pairs=sum(one.pairs for one in lists),
        tied=sum(one.tied for one in lists),
        apart=sum(one.apart for one in lists),
        swapped=sum(one.swapped for one in lists),
        swap_u=max((one.swap_u for one in lists), default=0.0),
        top10_overlap=_least(lists),
    )


def _worst(runs: Sequence[OrderVerdict]) -> OrderVerdict:
    """The run with the largest share of ties, with the worst of the others' figures."""
    worst = max(runs, key=lambda run: run.tied_share)
    return replace(
        worst,
        swapped=max(run.swapped for run in runs),
        swap_u=max(run.swap_u for run in runs),
        top10_overlap=_least(runs),
    )


def _least(found: Sequence[OrderVerdict]) -> float | None:
    return min((one.top10_overlap for one in found if one.top10_overlap is not None), default=None)
