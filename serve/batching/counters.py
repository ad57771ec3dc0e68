"""The counters of one version, plain integers: written once per batch, read by V2 statistics and /metrics.

A batch's figures are noted when it ends. They are added up together with those of many other batches, or at a read: to
touch two dozen counters takes as long as a tenth of the smallest batch. Adding up and reading take a lock, so that a
reader sees all counters of one moment.
"""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_NOTED = 64  # batches that are added up together
# Upper bounds in nanoseconds, 1 µs to 10 s; one more bucket takes what lies above.
_SCALES_NS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
BOUNDS_NS = (*(scale * step // 10 for scale in _SCALES_NS for step in (10, 25, 50)), 10_000_000_000)


def _empty_buckets() -> list[int]:
    return [0] * (len(BOUNDS_NS) + 1)


class Phase:
    """The times of one kind of work, as a histogram with one writer."""

    __slots__ = ("buckets", "spent_ns")

    def __init__(self) -> None:
        self.buckets = _empty_buckets()
        self.spent_ns = 0

    def add(self, spent_ns: int) -> None:
        self.buckets[bisect_left(BOUNDS_NS, spent_ns)] += 1
        self.spent_ns += spent_ns


@dataclass(slots=True, eq=False)
class Counters:
    """Counters of one version of one model: read a `copy`. All times are sums over requests, in nanoseconds.

    ``compute_ns`` counts a batch's run once for each of its requests, as Triton's does; ``batches`` has
    for each number of rows the executions and their own time. ``queue_buckets`` counts requests and
    ``compute_buckets`` executions, each by ``BOUNDS_NS``; ``answer_buckets`` counts requests by both times together.
    ``assemble_ns`` is the part of ``compute_ns`` in which
    inputs were joined (``assembled_ns``: counted once per batch), where the engine tells it. ``vanished`` are
    requests whose caller left before their batch began, ``rejected`` those whose caller was told that the queue is
    full, ``timed_out`` those whose own timeout passed while they waited. ``rescued_rows`` were answered by the FP32
    original. ``out_of_memory`` counts runs, ``row_ceiling`` (0: none) is the most rows of a run since. ``given_up`` are
    batches that failed undivided because their engine fails on everything.
    """

    version: str
    requests: int = 0
    rows: int = 0
    executions: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    failures: int = 0
    failures_ns: int = 0
    vanished: int = 0
    rejected: int = 0
    timed_out: int = 0
    last_inference_ms: int = 0
    batches: dict[int, tuple[int, int]] = field(default_factory=dict)
    queue_buckets: list[int] = field(default_factory=_empty_buckets)
    compute_buckets: list[int] = field(default_factory=_empty_buckets)
    assemble_ns: int = 0
    assembled_ns: int = 0
    assemble_buckets: list[int] = field(default_factory=_empty_buckets)
    rescued_rows: int = 0
    out_of_memory: int = 0
    given_up: int = 0
    row_ceiling: int = 0
    answer_buckets: list[int] = field(default_factory=_empty_buckets)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _noted: deque[tuple[Sequence[int], int, int, int, int]] = field(default_factory=deque, repr=False)

    def executed(self, waits_ns: Sequence[int], rows: int, compute_ns: int, assemble_ns: int = 0) -> None:
        """One batch was run and answered; ``waits_ns``: its requests' waits, without parts of larger ones.

        ``assemble_ns`` is the part of ``compute_ns`` in which its inputs were joined, where the engine tells it.
        """
        noted = self._noted
        noted.append((waits_ns, rows, compute_ns, assemble_ns, time.time_ns()))
        if len(noted) >= _NOTED:
            with self.lock:
                self._add_up()

    def _add_up(self) -> None:
        """Add up what was noted before this call: the writer may note more meanwhile."""
        for _ in range(len(self._noted)):
            waits_ns, rows, compute_ns, assemble_ns, at_ns = self._noted.popleft()
            requests = len(waits_ns)
            self.requests += requests
            self.rows += rows
            self.executions += 1
            self.queue_ns += sum(waits_ns)
            self.compute_ns += compute_ns * requests
            self.assemble_ns += assemble_ns * requests
            self.assembled_ns += assemble_ns
            self.last_inference_ms = at_ns // 1_000_000
            count, spent_ns = self.batches.get(rows, (0, 0))
            self.batches[rows] = (count + 1, spent_ns + compute_ns)
            self.compute_buckets[bisect_left(BOUNDS_NS, compute_ns)] += 1
            self.assemble_buckets[bisect_left(BOUNDS_NS, assemble_ns)] += 1
            _sort(self.queue_buckets, waits_ns)
            _sort(self.answer_buckets, waits_ns, compute_ns)

    def joined(self, queue_ns: int, compute_ns: int) -> None:
        """A request that was run in parts is answered; its rows and batches have been counted by part."""
        with self.lock:
            self.requests += 1
            self.queue_ns += queue_ns
            self.compute_ns += compute_ns
            _sort(self.queue_buckets, [queue_ns])
            _sort(self.answer_buckets, [queue_ns], compute_ns)

    def failed(self, spent_ns: int) -> None:
        """One request's own execution failed, ``spent_ns`` after it came."""
        with self.lock:
            self.failures += 1
            self.failures_ns += spent_ns

    def rescued(self, rows: int) -> None:
        """Rows that a half could not compute were answered by its FP32 original."""
        with self.lock:
            self.rescued_rows += rows

    def ran_out(self, times: int, row_ceiling: int) -> None:
        """The device ran out of memory; runs have at most ``row_ceiling`` rows since."""
        with self.lock:
            self.out_of_memory += times
            self.row_ceiling = row_ceiling

    def gave_up(self) -> None:
        """A batch failed as a whole and was not divided: its engine fails on everything."""
        with self.lock:
            self.given_up += 1

    def copy(self) -> "Counters":
        """All counters as of one moment, for a reader on another thread."""
        with self.lock:
            self._add_up()
            return replace(
                self,
                batches=dict(self.batches),
                queue_buckets=list(self.queue_buckets),
                compute_buckets=list(self.compute_buckets),
                assemble_buckets=list(self.assemble_buckets),
                answer_buckets=list(self.answer_buckets),
                lock=threading.Lock(),
                _noted=deque(),
            )


def _sort(buckets: list[int], waits_ns: Sequence[int], more_ns: int = 0) -> None:
    """Count each wait, with ``more_ns`` added, in its bucket."""
    if not waits_ns:
        return
    longest = bisect_left(BOUNDS_NS, max(waits_ns) + more_ns)
    # Two searches are nearly always enough for all requests.
    if longest == bisect_left(BOUNDS_NS, min(waits_ns) + more_ns):
        buckets[longest] += len(waits_ns)
        return
    for wait_ns in waits_ns:
        buckets[bisect_left(BOUNDS_NS, wait_ns + more_ns)] += 1
