"""The requests that wait for the device, by shape, urgency and order of arrival. Only the device thread uses a queue.

Requests of one shape are one group: only they can be joined. Where lengths may be filled up
(`models/spec/filled_lengths.py`) a group has those that go into one size, and neighbouring sizes share a batch where
that costs less than another one (`cheapest_batch.py`). Rows are counted, not requests. A request whose caller has gone,
or whose time is up, is dropped when it would be run.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from ...models.spec.filled_lengths import Lengths, Shapes
from .cheapest_batch import cheapest_batch
from .interface import Answer
from .split_request import Part, SplitRequest

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

    def fill(self, lengths: Lengths, shapes: Shapes) -> None:
        """Fill the inputs up to ``shapes``, unless they have them."""
        if self.shapes != shapes:
            self.given = lengths, self.arrays
            self.arrays = lengths.filled(self.arrays, shapes)

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
            replace(
                self,
                arrays=[array[start : start + limit] for array in self.arrays],
                rows=min(limit, self.rows - start),
                nbytes=self.nbytes // self.rows * min(limit, self.rows - start),
                special=True,
                part=Part(split, index, start + limit >= self.rows),
            )
            for index, start in enumerate(starts)
        ]


@dataclass(slots=True, eq=False)
class FormedBatch:
    """Requests that are run together. ``split``: parts of a larger request are among them."""

    requests: list[Request]
    rows: int
    split: bool = False


@dataclass(slots=True, eq=False)
class _ShapeGroup:
    """Requests of one shape. ``most``: the rows that may be in one batch by their bytes. ``kind``: groups of one kind
    may share a batch; None: with no other group. ``sizes``: of the axes that are filled up."""

    most: int
    kind: Shapes | None = None
    sizes: tuple[int, ...] = ()
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
    Counts of requests: ``taken`` have left the queue; of these the callers of ``vanished`` had gone, and the time of
    ``expired`` was up. Another thread may read these counts, and that of ``groups``.
    """

    def __init__(self, limit: int, delay_ns: int, batch_bytes: int = 0) -> None:
        self.limit = limit
        self.delay_ns = delay_ns
        self.batch_bytes = batch_bytes
        self._expected = 0
        self._wait_ends_ns = 0
        self.taken = self.taken_rows = self.taken_urgent_rows = self.taken_bytes = 0
        self.vanished = self.expired = 0
        self._lengths: Lengths | None = None
        self._groups: dict[Shapes | None, _ShapeGroup] = {}
        self._next: _ShapeGroup | None = None
        self.lock = threading.Lock()  # held while a batch is formed, and while a request is counted out

    @property
    def groups(self) -> int:
        return len(self._groups)

    @property
    def _rows(self) -> int:
        return sum([group.rows for group in self._groups.values()])

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

    def join_lengths(self, lengths: Lengths | None) -> None:
        """From now on requests whose shapes are the same once they are filled up are joined; those that wait too."""
        if lengths == self._lengths:
            return
        self._lengths, groups = lengths, list(self._groups.values())
        waiting = [request for group in groups for request in (*group.ordinary, *group.urgent)]
        self._groups, self._next = {}, None
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
        earliest_ns, self._next, waiting = None, None, self._rows
        for shapes in list(self._groups):
            group = self._groups[shapes]
            for line in (group.ordinary, group.urgent):
                while line and line[0].future.done():
                    self._drop(group, line.popleft())
            if not group.ordinary and not group.urgent:
                del self._groups[shapes]
                continue
            due_ns = self._due_ns(group, waiting)
            if earliest_ns is None or due_ns < earliest_ns:
                earliest_ns, self._next = due_ns, group
        return earliest_ns

    @property
    def fills_a_batch(self) -> bool:
        """True if the batch whose time ``due_ns`` gave is as large as a batch may be."""
        return self._next is not None and self._full(self._next)

    def wait_for_more(self, answered: int, until_ns: int) -> None:
        """Begin no batch until ``until_ns`` with fewer rows than those that wait now plus the ``answered`` rows."""
        self._expected = self._rows + answered
        self._wait_ends_ns = until_ns

    def form(self) -> FormedBatch:
        """The batch whose time ``due_ns`` gave: as many requests from the front of its group as fit, and those of
        the groups that share the batch with it.

        Empty where every caller has gone meanwhile. A request above the limit (a swap lowered it) is run alone.
        """
        batch = FormedBatch([], 0)
        if self._next is None:
            return batch
        with self.lock:
            groups = self._sharing(self._next)
            limit = min(self.limit, *(group.most for group in groups))
            for group in groups:
                self._take(group, limit, batch)
                if batch.requests and batch.requests[0].alone:
                    break
        return batch

    def _sharing(self, head: _ShapeGroup) -> list[_ShapeGroup]:
        """The groups that share a batch with ``head``, which is the first of them: where there are others, all their
        rows fit."""
        if head.kind is None:
            return [head]
        groups = sorted(
            (group for group in self._groups.values() if group.kind == head.kind),
            key=lambda group: group.sizes,
        )
        rows, sizes = [group.rows for group in groups], [group.sizes for group in groups]
        most = [min(self.limit, group.most) for group in groups]
        shared = cheapest_batch(groups.index(head), rows, sizes, most)
        return [head, *(groups[index] for index in shared if groups[index] is not head)]

    def _take(self, group: _ShapeGroup, limit: int, batch: FormedBatch) -> None:
        """Move requests from the front of the group into the batch, as many as fit."""
        taken: list[Request] = []
        rows, special = batch.rows, False
        while line := group.line() if group.urgent else group.ordinary:
            request = line[0]
            if rows and (rows + request.rows > limit or (request.special and request.alone)):
                break
            line.popleft()
            if request.future.done():  # a plain read: safe from another thread than the loop's
                self._drop(group, request)
                continue
            taken.append(request)
            rows += request.rows
            if request.special:
                special = True
                if request.alone:
                    break
        self._add(batch, group, taken, rows - batch.rows, special)

    def form_begun(self) -> FormedBatch:
        """The next part of a split request of which a part has run already; empty where there is none."""
        batch = FormedBatch([], 0)
        with self.lock:
            for group in self._groups.values():
                for line in (group.ordinary, group.urgent):
                    while line and (part := line[0].part) is not None and part.request.begun:
                        request = line.popleft()
                        if not request.future.done():
                            self._add(batch, group, [request], request.rows, True)
                            return batch
                        self._drop(group, request)
        return batch

    def _add(
        self, batch: FormedBatch, group: _ShapeGroup, requests: list[Request], rows: int, special: bool
    ) -> None:
        """Add these requests, which have left the group, to the batch."""
        group.rows -= rows
        self.taken += len(requests)
        self.taken_rows += rows
        if requests and requests[0].nbytes:
            self.taken_bytes += sum([request.nbytes for request in requests])
        for request in requests:
            request.began = True
        if special:
            batch.split |= self._mark(requests)
        batch.requests += requests
        batch.rows += rows

    def _mark(self, requests: list[Request]) -> bool:
        """Count what is special; gives whether parts of a larger request are among them."""
        split = False
        for request in requests:
            if request.urgent:
                self.taken_urgent_rows += request.rows
            if request.part is not None:
                request.part.request.begun = split = True
                self.taken -= not request.part.last
        return split

    def _drop(self, group: _ShapeGroup, request: Request) -> None:
        """Count a request that has left its queue and whose answer has no reader any more."""
        group.rows -= request.rows
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
        group = _ShapeGroup(sys.maxsize)
        if self._lengths is not None and shapes is not None:
            group.kind, group.sizes = self._lengths.kind(shapes)
        if self.batch_bytes:
            own = [array.size // request.rows for array in request.arrays]
            sizes = own if shapes is None else map(prod, shapes)
            nbytes = sum(size * array.itemsize for size, array in zip(sizes, request.arrays, strict=True))
            group.most = max(1, self.batch_bytes // max(nbytes, 1))
        return group

    def _full(self, group: _ShapeGroup) -> bool:
        return group.rows >= min(self.limit, group.most)

    def _due_ns(self, group: _ShapeGroup, waiting: int) -> int:
        """The time when the group's next batch may start: an urgent or lone request waits neither for the delay nor for
        others."""
        if group.urgent:
            return group.line()[0].since_ns - (HEAD_START_NS if group.line() is group.urgent else 0)
        head = group.ordinary[0]
        since_ns = head.since_ns
        if head.alone or self._full(group):
            return since_ns
        if waiting < self._expected:
            since_ns = max(since_ns, self._wait_ends_ns)
        return since_ns + self.delay_ns
