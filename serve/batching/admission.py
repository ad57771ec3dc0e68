"""Requests are admitted within limits of their number, their bytes and their waiting time. A refused caller is told
when to retry.

The device thread measures how long batches take (`Pace`); the event loop counts requests and decides (`Admission`).
Each number has one writer, and the waiting requests are the difference of two numbers: to admit a request takes no
lock. Only to count out a request whose caller has left takes the queue's lock.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...models.errors import Overloaded
from ...models.spec.datatypes import name_of
from ...models.spec.filled_lengths import Shapes
from ...models.spec.spec import ModelSpec
from .request_queue import Request, RequestQueue

_NEWEST = 0.25  # weight of the newest batch in the moving average of its size
# A measurement counts as at most this many times the average: one pause must not change it much.
_MOST_GROWTH = 4


class _Uncounted(threading.local):
    """Within ``with UNCOUNTED:`` no caller is told of what this thread's queues refuse, so that it is not counted:
    another version is asked then."""

    depth = 0  # a trial may ask the trial of another version

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


UNCOUNTED = _Uncounted()


@dataclass(slots=True)
class _Cost:
    """Moving averages of the batches of about one size."""

    rows: float
    ns: float


class Pace:
    """The time that a batch takes on this device, by its size, including the wait for other models' batches.

    Sizes between two powers of two are one kind. A size that was never run is assumed to take as long as the largest
    smaller one: the first batch of that size measures it, and a refusal on a guess would keep it from being run.
    """

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        self._last_end_ns = 0
        self._max_wait_ns = 0
        self._shapes_differ = False
        self.full_ns = 0.0  # what a full batch costs
        self.ends_ns = 0.0  # when the batch under way should end; 0: none is
        self.easy_rows = math.inf  # while no more rows wait, no request can have to wait too long

    def read(self, spec: ModelSpec, full_rows: int) -> None:
        self._max_wait_ns = spec.batching.max_queue_ms * 1_000_000
        self._shapes_differ = any(not dim.fixed for tensor in spec.inputs for dim in tensor.shape[1:])
        self._look_ahead(full_rows)

    @property
    def measured(self) -> bool:
        """True if the cost of any batch is known."""
        return self._last_end_ns > 0

    def cost_ns(self, rows: int) -> float:
        """Nanoseconds for a batch of so many rows; 0 where nothing has been measured."""
        kind = rows.bit_length()
        if (cost := self._costs.get(kind)) is not None:
            return cost.ns * rows / cost.rows
        known = list(self._costs)  # at once: the device thread may be adding one
        smaller = [size for size in known if size < kind]
        return self._costs[max(smaller or known)].ns if known else 0.0

    def begins(self, rows: int, now_ns: int) -> None:
        self.ends_ns = max(self.ends_ns, now_ns) + self.cost_ns(rows)

    def rests(self) -> None:
        self.ends_ns = 0.0

    def ended(self, rows: int, oldest_ns: int, began_ns: int, now_ns: int, full_rows: int) -> None:
        """A batch was answered whose oldest request came at ``oldest_ns``; other batches may be under way.

        Where that request waited since the batch before, the batch took the time between the two ends.
        """
        alone_ns = now_ns - max(began_ns, self._last_end_ns)
        kind = rows.bit_length()
        if (cost := self._costs.get(kind)) is None:
            self._costs[kind] = _Cost(rows, alone_ns)
        else:
            took_ns = now_ns - self._last_end_ns if oldest_ns <= self._last_end_ns else alone_ns
            cost.rows += _NEWEST * (rows - cost.rows)
            cost.ns += _NEWEST * (min(took_ns, _MOST_GROWTH * max(cost.ns, alone_ns)) - cost.ns)
        self._last_end_ns = now_ns
        self._look_ahead(full_rows)

    def _look_ahead(self, full_rows: int) -> None:
        """Compute ``full_ns`` and ``easy_rows`` for the worst case: a full batch is under way, and where shapes differ
        each row is a batch of its own."""
        self.full_ns = self.cost_ns(full_rows)
        if not self._max_wait_ns or not self.full_ns:
            self.easy_rows = math.inf
            return
        batches = self._max_wait_ns // self.full_ns - 1
        self.easy_rows = batches if self._shapes_differ else batches * full_rows


@dataclass(frozen=True, slots=True)
class Intake:
    """The numbers of a spec that every request is checked against, computed once. It is replaced as one object when a
    spec changes, so that no request is checked against two specs.

    A request with more rows than ``batch_rows`` is split, one with more than ``max_rows`` refused. One with up to
    ``plain_rows`` and without terms needs no other check. ``row_bytes``: of all inputs of a row together, 0 where
    shapes differ. ``timeout_ns``: for requests that give none (0: no limit). ``suspicious``: a version with other
    inputs became active once, and requests may come that were checked against the older one.
    """

    spec: ModelSpec
    max_rows: int
    batch_rows: int
    plain_rows: int
    row_bytes: int
    shapes_differ: bool
    timeout_ns: int
    suspicious: bool

    @classmethod
    def of(cls, spec: ModelSpec, suspicious: bool = False) -> "Intake":
        """The intake of a spec. Where the model is not batched, a request is one execution and counts as one row."""
        inner = [t.shape[1:] if spec.batched else t.shape for t in spec.inputs]
        differ = any(not dim.fixed for shape in inner for dim in shape)
        sizes = [math.prod(dim.minimum for dim in shape) for shape in inner]
        row_bytes = sum(n * t.type.numpy.itemsize for n, t in zip(sizes, spec.inputs, strict=True))
        timeout_ns = spec.batching.timeout_ms * 1_000_000
        batch_rows = max(spec.max_batch_size, 1)
        plain = not suspicious and not timeout_ns and (spec.batched or not differ)
        return cls(
            spec,
            max_rows=spec.max_request_rows if spec.batched else 1,
            batch_rows=batch_rows,
            plain_rows=batch_rows if plain else 0,
            row_bytes=0 if differ else row_bytes,
            shapes_differ=differ,
            timeout_ns=timeout_ns,
            suspicious=suspicious,
        )

    def measured(self, arrays: Sequence[np.ndarray]) -> tuple[Shapes | None, int]:
        """The shapes, which requests must share to share a batch, and the bytes; None and 0 where shapes are fixed."""
        if not self.shapes_differ:
            return None, 0
        inner = 1 if self.spec.batched else 0
        return tuple(array.shape[inner:] for array in arrays), sum(array.nbytes for array in arrays)

    def fits(self, arrays: Sequence[np.ndarray]) -> bool:
        """True if the arrays pass the checks of this spec."""
        return len(arrays) == len(self.spec.inputs) and all(
            tensor.fault(array.shape, name_of(array.dtype)) is None
            and (valid is None or valid.fault(array) is None)
            for tensor, array, valid in zip(self.spec.inputs, arrays, self.spec.ranges(arrays), strict=True)
        )

    def part_rows(self, request: Request, limit: int) -> int:
        """The rows of each part of a large request. A request for deterministic answers always gets the same."""
        if request.alone:
            return self.batch_rows
        if most := self.spec.batching.max_batch_bytes:
            limit = min(limit, max(1, most // max(self.row_bytes or request.nbytes // request.rows, 1)))
        return limit


class Admission:
    """Counts the requests that are admitted and refuses those that would wait too long: one model, one event loop."""

    def __init__(self, intake: Intake, queue: RequestQueue, pace: Pace, refused: Callable[[], None]) -> None:
        self._queue = queue
        self._pace = pace
        self._refused = refused
        self.requests = self.rows = self.urgent_rows = self.bytes = 0
        self.read(intake)

    def read(self, intake: Intake) -> None:
        spec = intake.spec
        self._name = spec.name
        self._row_bytes = intake.row_bytes
        self._max_requests = spec.batching.max_queue_size
        self._max_bytes = spec.batching.max_queue_bytes
        self._max_wait_ns = spec.batching.max_queue_ms * 1_000_000
        self._easy_rows = self._max_requests
        if self._row_bytes:
            self._easy_rows = min(self._max_requests, self._max_bytes // self._row_bytes)

    @property
    def waiting(self) -> int:
        """Admitted requests whose batch has not begun."""
        return self.requests - self._queue.taken

    @property
    def _waiting_bytes(self) -> int:
        if self._row_bytes:
            return self._row_bytes * (self.rows - self._queue.taken_rows)
        return self.bytes - self._queue.taken_bytes

    def admit(self, rows: int, nbytes: int, now_ns: int, urgent: bool = False, timeout_ns: int = 0) -> None:
        """Admit one request. Raises Overloaded where it would wait longer than a limit or its own timeout.

        While few rows wait, no limit on requests can be near: each request has at least one row.
        """
        queue = self._queue
        ahead = self.rows - queue.taken_rows
        if (
            ahead + rows > self._easy_rows
            or ahead >= self._pace.easy_rows
            or timeout_ns
            or (nbytes and self.bytes - queue.taken_bytes + nbytes > self._max_bytes)
        ):
            self._hold_against_limits(nbytes or rows * self._row_bytes, now_ns, urgent, timeout_ns)
        self.requests += 1
        self.rows += rows
        self.bytes += nbytes
        if urgent:
            self.urgent_rows += rows

    def leave(self, requests: Iterable[Request]) -> None:
        """Count out what has not begun: nobody waits for it any more."""
        with self._queue.lock:
            for request in requests:
                if request.began or request.left:
                    continue
                request.left = True
                self.requests -= request.counts
                self.rows -= request.rows
                self.bytes -= request.nbytes
                if request.urgent:
                    self.urgent_rows -= request.rows

    def _hold_against_limits(self, nbytes: int, now_ns: int, urgent: bool, timeout_ns: int) -> None:
        """A request that finds the queue empty is admitted whatever its bytes: it would be no smaller later. Ordinary
        requests that wait do not keep an urgent one out: where the queue is full, the rows of urgent ones count."""
        if self.waiting >= self._max_requests and (
            not urgent or self.urgent_rows - self._queue.taken_urgent_rows >= self._max_requests
        ):
            raise self._refusal(
                f"already has {self.waiting} requests waiting (batching.max_queue_size is {self._max_requests})",
                now_ns,
            )
        waiting_bytes = self._waiting_bytes
        if waiting_bytes and waiting_bytes + nbytes > self._max_bytes:
            raise self._refusal(
                f"already has {waiting_bytes} bytes of inputs waiting and this request has {nbytes} "
                f"(batching.max_queue_bytes is {self._max_bytes})",
                now_ns,
            )
        most_ns = min(self._max_wait_ns or math.inf, timeout_ns or math.inf)
        if (wait_ns := self.wait_ns(urgent, now_ns)) > most_ns:
            raise self._too_late(wait_ns, timeout_ns, now_ns)

    def wait_ns(self, urgent: bool, now_ns: int) -> float:
        """Nanoseconds that a new request would wait: the rest of the batch under way and the full batches before its
        own. Any thread may read it.

        Requests of different shapes are not joined, so each group of them beside the first is one batch more.
        """
        queue, pace = self._queue, self._pace
        ahead = self.urgent_rows - queue.taken_urgent_rows if urgent else self.rows - queue.taken_rows
        wait_ns = pace.ends_ns - now_ns
        if wait_ns < 0:
            wait_ns = 0.0
        if ahead >= queue.limit:
            wait_ns += ahead // queue.limit * pace.full_ns
        groups = queue.groups
        return wait_ns + (groups - 1) * pace.full_ns if groups > 1 and not urgent else wait_ns

    def retry_after_s(self, now_ns: int) -> float:
        """Seconds until the requests that wait now are answered; 1 where nothing has been measured."""
        queue, pace = self._queue, self._pace
        rows = self.rows - queue.taken_rows
        wait_ns = max(pace.ends_ns - now_ns, 0.0) + rows // queue.limit * pace.full_ns
        if rest := rows % queue.limit:
            wait_ns += pace.cost_ns(rest)
        return wait_ns / 1e9 or 1.0

    def _too_late(self, wait_ns: float, timeout_ns: int, now_ns: int) -> Overloaded:
        if timeout_ns and wait_ns > timeout_ns:
            limit = f"the request's timeout is {timeout_ns / 1e6:.3g} ms"
        else:
            limit = f"batching.max_queue_ms is {self._max_wait_ns // 1_000_000}"
        return self._refusal(
            f"has {self.waiting} requests waiting, so this one would wait about {wait_ns / 1e6:.3g} ms ({limit})",
            now_ns,
        )

    def _refusal(self, why: str, now_ns: int) -> Overloaded:
        if not UNCOUNTED.depth:
            self._refused()
        after_s = self.retry_after_s(now_ns)
        return Overloaded(
            f"model '{self._name}' {why}; try again in {after_s:.3g} s, or raise the limit", after_s
        )
