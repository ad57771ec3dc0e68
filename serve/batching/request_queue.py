"""What waits for the device, by shape and in order of arrival. The device thread alone touches a queue.

Requests of one shape stand in one lane: only they can be joined. Rows are counted, not requests. A caller who
has gone is dropped when his turn comes and costs nothing more.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..duty import Answer

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request. ``shapes``: its inputs' without the batch, None where they cannot differ."""

    arrays: Sequence[np.ndarray]
    rows: int
    future: asyncio.Future[Answer]
    since_ns: int
    shapes: Shapes | None


@dataclass(slots=True, eq=False)
class _Lane:
    requests: deque[Request] = field(default_factory=deque)
    rows: int = 0


class RequestQueue:
    """``limit``: the rows of a full batch. ``delay_ns``: how long the oldest may wait for a batch to fill.

    After a batch the next may be given a breath (`breathe`): time for those just answered to ask again.
    ``present`` is how many wait here; ``taken`` how many ever left, ``vanished`` how many of those had gone.
    """

    def __init__(self, limit: int, delay_ns: int) -> None:
        self.limit = limit
        self.delay_ns = delay_ns
        self._expected = 0
        self._breath_ends_ns = 0
        self.present = 0
        self.taken = 0
        self.vanished = 0
        self._lanes: dict[Shapes | None, _Lane] = {}
        self._next: _Lane | None = None

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            lane = self._lanes.get(request.shapes)
            if lane is None:
                lane = self._lanes[request.shapes] = _Lane()
            lane.requests.append(request)
            lane.rows += request.rows
            self.present += 1

    def due_ns(self) -> int | None:
        """When the next batch may start: the oldest request's arrival, later by the delay unless it is full.

        None where nothing waits. The lane that is due first is next, so nobody is overtaken for ever.
        """
        earliest_ns, self._next = None, None
        for shapes in list(self._lanes):
            lane = self._lanes[shapes]
            while lane.requests and lane.requests[0].future.done():
                self._pop(lane)
            if not lane.requests:
                del self._lanes[shapes]
                continue
            due_ns = self._due_ns(lane)
            if earliest_ns is None or due_ns < earliest_ns:
                earliest_ns, self._next = due_ns, lane
        return earliest_ns

    def breathe(self, answered: int, until_ns: int) -> None:
        """Until then begin no batch smaller than what waits and what was just answered, together (rows)."""
        self._expected = sum(lane.rows for lane in self._lanes.values()) + answered
        self._breath_ends_ns = until_ns

    def _due_ns(self, lane: _Lane) -> int:
        since_ns = lane.requests[0].since_ns
        if lane.rows >= self.limit:
            return since_ns
        if lane.rows < self._expected:
            since_ns = max(since_ns, self._breath_ends_ns)
        return since_ns + self.delay_ns

    def form(self) -> list[Request]:
        """The batch that ``due_ns`` spoke of: as many requests from the front of its lane as fit.

        Empty where every caller has gone meanwhile. A request above the limit (a swap lowered it) goes alone.
        """
        batch: list[Request] = []
        rows = 0
        lane = self._next
        while lane and lane.requests and (not batch or rows + lane.requests[0].rows <= self.limit):
            if (request := self._pop(lane)) is not None:
                batch.append(request)
                rows += request.rows
        return batch

    def _pop(self, lane: _Lane) -> Request | None:
        """The next request of the lane, or None where its caller has gone."""
        request = lane.requests.popleft()
        lane.rows -= request.rows
        self.present -= 1
        self.taken += 1
        if request.future.done():  # a plain read: safe from another thread than the loop's
            self.vanished += 1
            return None
        return request
