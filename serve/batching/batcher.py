"""Many requests in, few batches on the device, every caller answered: one batcher per model.

A batch is what waits when the device is free. Admission comes before anything else. The hand-over to the
device thread happens once per iteration of the event loop, and the way back is one call per batch:

    event loop      submit → pending ──flush──▶ inbox                         futures ◀── settle
    device thread                               inbox → queue → batch → execution → outcomes ──▲
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...models.errors import BadRequest, EngineFailed, NotReady, Overloaded
from ...models.spec import ModelSpec
from ..duty import NO_TERMS, Answer, OnDuty, Statistics, Terms
from .device import DeviceThread
from .execution import Execution, Outcome
from .request_queue import Request, RequestQueue
from .tally import Tally

logger = logging.getLogger("halfeven.batcher")
_RECENT = 0.1  # weight of the newest batch in the moving average of what a request costs
# Who was answered together often asks again together. Without a breath the first of them would be a batch of
# its own, and the others would wait for it. The breath is a small share of what the batch took, and ends early when
# everybody is back. A batch so short that a timer would cost more than it saves is followed by none.
_BREATH_SHARE, _BREATH_MAX_NS, _BREATH_FROM_NS = 25, 2_000_000, 2_500_000


class Batcher:
    """Takes requests on one event loop and runs them on ``device`` by the version that ``duty`` names.

    Use it from one event loop: the futures belong to it. Outputs are handed on as views of what the engine
    returned, so an engine returns fresh arrays from every run.
    """

    def __init__(self, spec: ModelSpec, device: DeviceThread, duty: OnDuty) -> None:
        self.duty = duty
        self._device = device
        self._clock = device.clock
        self._tallies = {duty.version: Tally(duty.version)}
        self._queue = RequestQueue(limit=1, delay_ns=0)  # the device thread's
        self._inbox: deque[list[Request]] = deque()  # the event loop appends, the device thread takes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: list[Request] = []
        self._accepted = 0
        self._refusing = False
        self._drained: asyncio.Event | None = None
        self._ns_per_request = 0.0
        self._read(spec)
        device.attach(self)

    def _read(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._max_queue = spec.batching.max_queue_size
        self._shapes_differ = spec.batched and any(not dim.fixed for t in spec.inputs for dim in t.shape[1:])
        self._queue.limit = max(spec.max_batch_size, 1)  # not batched: one request is one execution
        self._queue.delay_ns = spec.batching.max_queue_delay_us * 1000

    # On the event loop.

    @property
    def waiting(self) -> int:
        """Requests accepted whose batch has not begun: derived from two counts with one writer each."""
        return self._accepted - self._queue.taken

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """Queue one checked request: C-contiguous arrays in the spec's order, ``rows`` along the first axis.

        Who leaves cancels the future. It raises EngineFailed where this request alone makes the engine fail.
        Raises Overloaded where ``max_queue_size`` requests wait, NotReady while draining, BadRequest where
        the request has more rows than a batch may have.
        """
        if self._refusing:
            raise self._not_ready()
        if self._accepted - self._queue.taken >= self._max_queue:
            raise self._overloaded()
        if not 0 < rows <= self._queue.limit:
            raise self._wrong_rows(rows)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        shapes = tuple([array.shape[1:] for array in arrays]) if self._shapes_differ else None
        future: asyncio.Future[Answer] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append(Request(arrays, rows, future, self._clock(), shapes))
        self._accepted += 1
        return future

    async def drain(self) -> None:
        """Refuse new work and return when everything accepted has been answered."""
        self._refusing = True
        if self._drained is None:
            self._bind(asyncio.get_running_loop())
            self._drained = asyncio.Event()
        self._flush()
        if self._device.ring():
            await self._drained.wait()

    def refuse(self) -> None:
        """Accept nothing more; what waits is still served. From any thread."""
        self._refusing = True

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and self._loop is not loop and not self._loop.is_closed():
            raise RuntimeError(f"the batcher of '{self.spec.name}' is used from two event loops; use one")
        self._loop = loop

    def _overloaded(self) -> Overloaded:
        tally = self._tallies[self.duty.version]
        with tally.lock:
            tally.rejected += 1
        waiting = self.waiting
        retry_after_s = self._ns_per_request * waiting / 1e9 or 1.0
        return Overloaded(
            f"model '{self.spec.name}' already has {waiting} requests waiting (batching.max_queue_size is "
            f"{self._max_queue}); try again in {retry_after_s:.3g} s, or raise the limit",
            retry_after_s,
        )

    def _not_ready(self) -> NotReady:
        return NotReady(
            f"model '{self.spec.name}' is shutting down and takes no new requests; ask another server"
        )

    def _wrong_rows(self, rows: int) -> BadRequest:
        return BadRequest(
            f"inference request batch-size must be at least 1 and <= {self._queue.limit} for "
            f"'{self.spec.name}', got {rows}; send it as several requests"
        )

    def _flush(self) -> None:
        """Hand over what this iteration of the loop has brought."""
        if not (pending := self._pending):
            return
        self._pending = []
        self._inbox.append(pending)
        if not self._device.ring():  # the thread ended between accepting and handing over
            _settle([(request, self._not_ready()) for request in pending])

    # On the device thread.

    @property
    def queued(self) -> int:
        return self._queue.present

    def due_ns(self) -> int | None:
        """When the next batch may start, on the device's clock; None where nothing waits."""
        while self._inbox:
            self._queue.add(self._inbox.popleft())
        before = self._queue.vanished
        due_ns = self._queue.due_ns()
        self._count_vanished(before)
        if due_ns is None and self._drained is not None and self._queue.taken == self._accepted:
            self._on_loop(self._drained.set)
        return due_ns

    def turn(self) -> None:
        """Run the next batch by the one version on duty, and answer its callers together."""
        before = self._queue.vanished
        batch = self._queue.form()
        self._count_vanished(before)
        if not batch:
            return
        began_ns = self._clock()
        duty = self.duty
        try:
            outcomes = Execution(self.spec, duty, self._tallies[duty.version], self._clock).outcomes(batch)
        except BaseException as error:  # out of memory, or a mistake of ours: still everybody is answered
            logger.exception("a batch of '%s' could not be run", self.spec.name)
            outcomes = [(request, EngineFailed(f"{type(error).__name__}: {error}")) for request in batch]
        took_ns = self._clock() - began_ns
        if len(batch) > 1 and took_ns >= _BREATH_FROM_NS:
            breath_ns = min(took_ns // _BREATH_SHARE, _BREATH_MAX_NS)
            self._queue.breathe(sum([request.rows for request in batch]), began_ns + took_ns + breath_ns)
        cost_ns = took_ns / len(batch)
        self._ns_per_request += (cost_ns - self._ns_per_request) * (_RECENT if self._ns_per_request else 1.0)
        self._on_loop(_settle, outcomes)  # last: who has his answer finds all counters up to date

    def swap(self, duty: OnDuty, spec: ModelSpec | None = None) -> OnDuty:
        """Put another version on duty and return the old one, which no batch uses any more: close it freely.

        Only on the device thread, where no batch is under way: ``device.call(lambda: batcher.swap(duty))``.
        Raises RuntimeError elsewhere. ``spec`` is given where the new version's limits differ.
        """
        if not self._device.here:
            raise RuntimeError("swap on the device thread: device.call(lambda: batcher.swap(duty))")
        old = self.duty
        if duty.version not in self._tallies:  # a rollback goes on counting
            self._tallies[duty.version] = Tally(duty.version)
        if spec is not None:
            self._read(spec)
        self.duty = duty
        return old

    def _count_vanished(self, before: int) -> None:
        if self._queue.vanished != before:
            tally = self._tallies[self.duty.version]
            with tally.lock:
                tally.vanished += self._queue.vanished - before

    def _on_loop(self, fn: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(fn, *arguments)
        except RuntimeError:  # the loop is closed: its callers are gone with it
            logger.info("answers of '%s' came after the event loop was closed", self.spec.name)

    # From any thread.

    def statistics(self, version: str | None = None) -> Statistics:
        """The counters of a version that is or was on duty here (by default the one on duty).

        Raises KeyError for a version that never was.
        """
        return self._tallies[version or self.duty.version].statistics()

    def tallies(self) -> list[Tally]:
        """A copy of the counters of every version that is or was on duty here."""
        return [tally.copy() for tally in list(self._tallies.values())]


def _settle(outcomes: Sequence[Outcome | tuple[Request, NotReady]]) -> None:
    """Answer a batch's callers. One may have left meanwhile: to set his future would raise, and leave the
    others without an answer (ray-project/ray#41199)."""
    for request, outcome in outcomes:
        if request.future.done():
            continue
        if isinstance(outcome, Answer):
            request.future.set_result(outcome)
        else:
            request.future.set_exception(outcome)
