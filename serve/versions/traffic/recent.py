"""The last five minutes of a model's traffic, in bins of five seconds, for the web pages.

The batchers' counters are read by the thread that watches the versions (`roster.py`): requests pay nothing for it.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...batching.counters import BOUNDS_NS, Counters

BIN_S, BINS = 5.0, 60
_NONE = (0,) * (len(BOUNDS_NS) + 1)


class Bin(NamedTuple):
    """The requests that were answered and those that were not, and by ``BOUNDS_NS`` how long the answered ones took."""

    answered: int = 0
    failed: int = 0
    buckets: tuple[int, ...] = _NONE


_IDLE = Bin()  # one object for all the bins of models that nobody asks


class Recent:
    """``clock`` gives seconds. `note` is called from one thread, the reading from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next_s = clock, clock() + BIN_S
        self._bins: deque[Bin] = deque(maxlen=BINS)
        self._seen: dict[str, Bin] = {}
        self.rescued_rows = 0

    def note(self, counters: Callable[[], Iterable[Counters]]) -> None:
        """Close the bin where its time has come; ``counters`` gives those of every version that answers callers."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        found = list(counters())
        seen = {one.version: _total(one) for one in found}
        news = [_since(self._seen.get(version), total) for version, total in seen.items()]
        self._bins.append(_sum(news))
        self._seen, self._next_s = seen, max(self._next_s + BIN_S, now_s)
        self.rescued_rows = sum(one.rescued_rows for one in found)

    def bins(self) -> list[Bin]:
        """The oldest first."""
        return list(self._bins)


def together(bins: Sequence[Bin]) -> Bin:
    return _sum(bins)


def quantile_ns(one: Bin, share: float) -> float | None:
    """The time within which ``share`` of the answered requests were answered: exact to its bucket, and taken as evenly
    spread inside of it. None where there was none."""
    sums = list(accumulate(one.buckets))
    if not sums[-1]:
        return None
    wanted = share * sums[-1]
    index = bisect_left(sums, wanted)
    above = BOUNDS_NS[min(index, len(BOUNDS_NS) - 1)]
    below = BOUNDS_NS[index - 1] if 0 < index <= len(BOUNDS_NS) else 0
    before = sums[index - 1] if index else 0
    return below + (above - below) * (wanted - before) / one.buckets[index]


def _total(one: Counters) -> Bin:
    failed = one.failures + one.rejected + one.timed_out
    return Bin(one.requests, failed, tuple(one.answer_buckets))


def _since(before: Bin | None, now: Bin) -> Bin:
    """The requests since ``before``; all of them where the version was loaded anew and counts from nothing."""
    if before is None or now.answered < before.answered or now.failed < before.failed:
        return now
    gained = tuple(new - old for new, old in zip(now.buckets, before.buckets, strict=True))
    return Bin(now.answered - before.answered, now.failed - before.failed, gained)


def _sum(bins: Sequence[Bin]) -> Bin:
    busy = [one for one in bins if one.answered or one.failed]
    if len(busy) < 2:
        return busy[0] if busy else _IDLE
    sums = tuple(map(sum, zip(*(one.buckets for one in busy), strict=True)))
    return Bin(sum(one.answered for one in busy), sum(one.failed for one in busy), sums)
