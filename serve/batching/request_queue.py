"""The requests that wait for the device, by shape, urgency and order of arrival. Only the device thread uses a queue.

Requests of one shape are one group: only they can be joined. Where lengths may be filled up
(`models/spec/filled_lengths.py`) it is the shape that they are filled up to. Rows are counted, not requests. A request
whose caller has gone, or whose time is up, is dropped when it would be run.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ...models.errors import BadRequest, EngineFailed, TimedOut
from ...models.spec.filled_lengths import Lengths, Shapes
from .interface import Answer

Outcome = Answer | EngineFailed | TimedOut | BadRequest


class SplitRequest:
    """A request with more rows than a batch takes: it is run in ``parts`` and answered as one. On the device thread.

    The parts are queued one behind the other in their group and are run as ordinary requests. They share the caller's
    future. A version that has begun a request answers all of it: a swap waits for its last part
    (`BatchScheduler.swap`).

    ``begun``: a part has been taken for a batch. ``over``: the request is answered, has failed, or its caller has gone;
    the remaining parts are ignored, and the request has been counted.
    """

    def __init__(self, parts: int) -> None:
        self.begun = False
        self.over = False
        self._answers: list[Answer | None] = [None] * parts

    def take(self, index: int, outcome: Outcome) -> Outcome | None:
        """Take the outcome of one part; gives that of the request once: at the last answer or the first failure."""
        if self.over:
            return None
        if isinstance(outcome, Answer):
            self._answers[index] = outcome
            if any(answer is None for answer in self._answers):
                return None
            outcome = _joined([answer for answer in self._answers if answer is not None])
        self.over = True
        self._answers.clear()
        return outcome


@dataclass(slots=True, eq=False)
class Part:
    """The place of one part in its request."""

    request: SplitRequest
    index: int
    last: bool


def _joined(answers: list[Answer]) -> Outcome:
    """One answer: outputs joined along the batch, the longest wait, the sum of the compute times."""
    prepared = answers[0].prepared
    if any(answer.prepared is not prepared for answer in answers):
        versions = sorted({answer.prepared.version for answer in answers})
        return EngineFailed(
            f"parts of one request were answered by versions {versions}; a mistake of ours, please report it"
        )
    try:
        outputs = [np.concatenate(shares) for shares in zip(*[a.outputs for a in answers], strict=True)]
    except (MemoryError, ValueError) as error:  # parts whose free dimensions differ, for one
        return EngineFailed(
            f"the answers to the {len(answers)} parts of a large request cannot be joined: {error}; "
            "send it as several requests"
        )
    return Answer(
        outputs,
        prepared,
        queue_ns=max(answer.queue_ns for answer in answers),
        compute_ns=sum(answer.compute_ns for answer in answers),
        batch_rows=max(answer.batch_rows for answer in answers),
        assemble_ns=sum(answer.assemble_ns for answer in answers),
        rescued=sum(answer.rescued for answer in answers),
    )


# An urgent request is queued as if it had come so much earlier. So it overtakes only requests that came later than
# that, and a request that has waited longer goes before urgent ones that come now.
HEAD_START_NS = 500_000_000


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request, or a part of one. ``shapes``: of its inputs without the batch axis, ``nbytes``: of its
    inputs; None and 0 where shapes are fixed. ``special``: any of the fields after it is not the default.

    ``alone``: no other request shares its batch. ``deadline_ns``: when its time is up, on the device's clock (0:
    never). ``began``: its batch has been formed. ``left``: nobody waited for it before that, and the event loop has
    counted it out. ``given``: its arrays before they were filled up to a common length, and how; None where they are as
    they came.
    """

    arrays: Sequence[np.ndarray]
    rows: int
    future: asyncio.Future[Answer]
    since_ns: int
    shapes: Shapes | None
    nbytes: int
    special: bool = False
    urgent: bool = False
    alone: bool = False
    deadline_ns: int = 0
    part: Part | None = None
    began: bool = False
    left: bool = False
    given: tuple[Lengths, Sequence[np.ndarray]] | None = None

    def fill(self, lengths: Lengths) -> None:
        self.given = lengths, self.arrays
        self.arrays = lengths.filled(self.arrays)

    def own(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs of the request's rows without what belongs to filled-up places."""
        if self.given is None:
            return outputs
        lengths, arrays = self.given
        return lengths.cut(outputs, arrays)

    @property
    def as_given(self) -> Sequence[np.ndarray]:
        """The request's arrays as the caller sent them."""
        return self.arrays if self.given is None else self.given[1]

    @property
    def counts(self) -> bool:
        """True if the request is undivided or is the last part of a divided one."""
        return self.part is None or self.part.last

    def parts(self, limit: int) -> list["Request"]:
        """This request divided into requests of ``limit`` rows; the last has the rest. Their arrays are views."""
        starts = range(0, self.rows, limit)
        split = SplitRequest(len(starts))
        return [
            Request(
                [array[start : start + limit] for array in self.arrays],
                min(limit, self.rows - start),
                self.future,
                self.since_ns,
                self.shapes,
                self.nbytes // self.rows * min(limit, self.rows - start),
                True,
                self.urgent,
                self.alone,
                self.deadline_ns,
                Part(split, index, start + limit >= self.rows),
            )
            for index, start in enumerate(starts)
        ]


@dataclass(slots=True, eq=False)
class FormedBatch:
    """Requests of one shape that are run together. ``split``: parts of a larger request are among them."""

    requests: list[Request]
    rows: int
    split: bool = False


@dataclass(slots=True, eq=False)
class _ShapeGroup:
    """Requests of one shape. ``most``: the rows that may be in one batch by their bytes."""

    most: int
    ordinary: deque[Request] = field(default_factory=deque)
    urgent: deque[Request] = field(default_factory=deque)
    rows: int = 0

    def line(self) -> deque[Request]:
        """The queue, ordinary or urgent, whose first request is next."""
        if not self.urgent or not self.ordinary:
            return self.urgent or self.ordinary
        first = self.urgent[0].since_ns - HEAD_START_NS <= self.ordinary[0].since_ns
        return self.urgent if first else self.ordinary


class RequestQueue:
    """``limit``: the rows of a full batch. ``delay_ns``: how long the oldest request may wait for a batch to fill.
    ``batch_bytes``: of the inputs of one batch at most, 0: no limit.

    After a batch the next may be given a short wait (`wait_for_more`): time for the callers just answered to ask again.
    Counts of requests: ``present`` wait here, ``taken`` have left the queue; of these the callers of ``vanished`` had
    gone, and the time of ``expired`` was up. Another thread may read these counts, and that of ``groups``.
    """

    def __init__(self, limit: int, delay_ns: int, batch_bytes: int = 0) -> None:
        self.limit = limit
        self.delay_ns = delay_ns
        self.batch_bytes = batch_bytes
        self._expected = 0
        self._wait_ends_ns = 0
        self.present = 0
        self.taken = self.taken_rows = self.taken_urgent_rows = self.taken_bytes = 0
        self.vanished = self.expired = 0
        self._lengths: Lengths | None = None
        self._groups: dict[Shapes | None, _ShapeGroup] = {}
        self._next: _ShapeGroup | None = None
        self.lock = threading.Lock()  # held while a batch is formed, and while a request is counted out

    @property
    def groups(self) -> int:
        return len(self._groups)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            shapes = request.shapes
            if self._lengths is not None and shapes is not None:
                shapes = self._lengths.shared(shapes)
            group = self._groups.get(shapes)
            if group is None:
                group = self._groups[shapes] = self._group(request, shapes)
            (group.urgent if request.urgent else group.ordinary).append(request)
            group.rows += request.rows
            self.present += 1

    def join_lengths(self, lengths: Lengths | None) -> None:
        """From now on requests whose shapes are the same once they are filled up are joined; those that wait too."""
        if lengths == self._lengths:
            return
        self._lengths, groups = lengths, list(self._groups.values())
        waiting = [request for group in groups for request in (*group.ordinary, *group.urgent)]
        self._groups, self._next, self.present = {}, None, 0
        self.add(sorted(waiting, key=lambda request: request.since_ns))

    def pass_by(self, requests: Iterable[Request]) -> None:
        """Count requests that were accepted and answered without entering the queue: a caller that leaves before the
        answer reaches it is not counted again."""
        with self.lock:
            for request in requests:
                self._count(request)
                request.began = True

    def passable(self, now_ns: int) -> bool:
        """True if no request waits here, and a request that came now would not wait for others."""
        return not self._groups and not self.delay_ns and now_ns >= self._wait_ends_ns

    def due_ns(self) -> int | None:
        """The time when the next batch may start: its oldest request's arrival, later by the delay unless it is full.

        None where no request waits. The group that is due first is next, so no group waits for ever.
        """
        earliest_ns, self._next = None, None
        for shapes in list(self._groups):
            group = self._groups[shapes]
            for line in (group.ordinary, group.urgent):
                while line and line[0].future.done():
                    self._drop(group, line.popleft())
            if not group.ordinary and not group.urgent:
                del self._groups[shapes]
                continue
            due_ns = self._due_ns(group)
            if earliest_ns is None or due_ns < earliest_ns:
                earliest_ns, self._next = due_ns, group
        return earliest_ns

    @property
    def fills_a_batch(self) -> bool:
        """True if the batch whose time ``due_ns`` gave is as large as a batch may be."""
        return self._next is not None and self._full(self._next)

    def wait_for_more(self, answered: int, until_ns: int) -> None:
        """Begin no batch until ``until_ns`` with fewer rows than those that wait now plus the ``answered`` rows."""
        self._expected = sum(group.rows for group in self._groups.values()) + answered
        self._wait_ends_ns = until_ns

    def form(self) -> FormedBatch:
        """The batch whose time ``due_ns`` gave: as many requests from the front of its group as fit.

        Empty where every caller has gone meanwhile. A request above the limit (a swap lowered it) is run alone.
        """
        with self.lock:
            return self._formed()

    def _formed(self) -> FormedBatch:
        if (group := self._next) is None:
            return FormedBatch([], 0)
        limit = min(self.limit, group.most)
        requests: list[Request] = []
        rows, special = 0, False
        while line := group.line() if group.urgent else group.ordinary:
            request = line[0]
            if requests and (rows + request.rows > limit or (request.special and request.alone)):
                break
            line.popleft()
            if request.future.done():  # a plain read: safe from another thread than the loop's
                self._drop(group, request)
                continue
            requests.append(request)
            rows += request.rows
            if request.special:
                special = True
                if request.alone:
                    break
        return self._batch(group, requests, rows, special)

    def form_begun(self) -> FormedBatch:
        """The next part of a split request of which a part has run already; empty where there is none."""
        with self.lock:
            return self._formed_of_begun()

    def _formed_of_begun(self) -> FormedBatch:
        for group in self._groups.values():
            for line in (group.ordinary, group.urgent):
                while line and (part := line[0].part) is not None and part.request.begun:
                    request = line.popleft()
                    if not request.future.done():
                        return self._batch(group, [request], request.rows, True)
                    self._drop(group, request)
        return FormedBatch([], 0)

    def _batch(self, group: _ShapeGroup, requests: list[Request], rows: int, special: bool) -> FormedBatch:
        """The batch of these requests, which have left the group."""
        group.rows -= rows
        self.present -= len(requests)
        self.taken += len(requests)
        self.taken_rows += rows
        if requests and requests[0].nbytes:
            self.taken_bytes += sum([request.nbytes for request in requests])
        for request in requests:
            request.began = True
        batch = FormedBatch(requests, rows)
        if special:
            self._mark(batch)
        return batch

    def _mark(self, batch: FormedBatch) -> None:
        for request in batch.requests:
            if request.urgent:
                self.taken_urgent_rows += request.rows
            if request.part is not None:
                request.part.request.begun = batch.split = True
                self.taken -= not request.part.last

    def _drop(self, group: _ShapeGroup, request: Request) -> None:
        """Count a request that has left its queue and whose answer has no reader any more."""
        group.rows -= request.rows
        self.present -= 1
        self._count(request)
        if request.part is not None:
            if request.part.request.over:  # its parts are one request
                return
            request.part.request.over = True
        if request.future.cancelled():
            self.vanished += 1
        else:
            self.expired += 1

    def _count(self, request: Request) -> None:
        if request.left:
            return
        self.taken += request.counts
        self.taken_rows += request.rows
        self.taken_bytes += request.nbytes
        if request.urgent:
            self.taken_urgent_rows += request.rows

    def _group(self, request: Request, shapes: Shapes | None) -> _ShapeGroup:
        if not self.batch_bytes:
            return _ShapeGroup(sys.maxsize)
        own = [array.size // request.rows for array in request.arrays]
        sizes = own if shapes is None else map(prod, shapes)
        nbytes = sum(size * array.itemsize for size, array in zip(sizes, request.arrays, strict=True))
        return _ShapeGroup(max(1, self.batch_bytes // max(nbytes, 1)))

    def _full(self, group: _ShapeGroup) -> bool:
        return group.rows >= min(self.limit, group.most)

    def _due_ns(self, group: _ShapeGroup) -> int:
        """The time when the group's next batch may start: an urgent or lone request waits neither for the delay nor for
        others."""
        if group.urgent:
            return group.line()[0].since_ns - (HEAD_START_NS if group.line() is group.urgent else 0)
        head = group.ordinary[0]
        since_ns = head.since_ns
        if head.alone or group.rows >= min(self.limit, group.most):
            return since_ns
        if group.rows < self._expected:
            since_ns = max(since_ns, self._wait_ends_ns)
        return since_ns + self.delay_ns
