"""Many requests in, few batches on the device, every caller answered: one batcher per model.

A batch is made of the requests that wait when the device is free. Admission comes first. The hand-over to the
device thread happens once per iteration of the event loop, and the way back is one call per batch:

    event loop      submit → pending ──flush──▶ inbox                         futures ◀── settle
    device thread                               inbox → queue → batch → execution → outcomes ──▲
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...models.errors import BadRequest, NotReady
from ...models.spec.spec import ModelSpec
from .admission import Admission, Intake
from .counters import Counters
from .device import DeviceThread
from .execution import Outcome
from .interface import NO_TERMS, Answer, PreparedVersion, Terms
from .leaving import WaitingFuture, expire_after
from .request_queue import Request
from .scheduler import BatchScheduler, Refused, changed, same_signature

logger = logging.getLogger("halfeven.batcher")
# A batch on the event loop that took so long held up all connections: that many hand-overs then go to the device
# thread.
_LONG_NS, _LONG_FOR = 2_000_000, 1000
LOOK_NS = 100_000  # one poll, the writing of the answer included
_AT_ONCE_NS = 250_000  # from an answer to the next request, where the caller asked again at once
_RAREST = 64  # answers


class Batcher:
    """Takes requests on one event loop and runs them on ``device`` by the version that ``prepared`` names.

    Use it from one event loop: the futures belong to it. Outputs are handed on as views of what the engine
    returned, so an engine returns fresh arrays from every run. ``background``: its batches wait for those of
    all other models (`DeviceThread.attach`).
    """

    def __init__(
        self, spec: ModelSpec, device: DeviceThread, prepared: PreparedVersion, background: bool = False
    ) -> None:
        self.spec = spec
        self.prepared = prepared
        self._device = device
        self._clock = device.clock
        self._scheduler = BatchScheduler(
            spec, device, prepared, lambda outcomes: self._on_loop(_settle, outcomes), ahead=not background
        )
        self._queue = self._scheduler.queue
        self._intake = Intake.of(spec)
        self._admission = Admission(self._intake, self._queue, self._scheduler.pace, self._scheduler.refused)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: list[Request] = []
        self._pending_spec = spec
        self._refusing = False
        self._background = background
        self._long_ago = 0
        self._is_lonely = False  # the last hand-over had one request
        self._ran_alone = False  # in this iteration of the loop
        self._brief_polling = BriefPolling(device.clock, lambda: device.asleep)
        self._drained: asyncio.Event | None = None
        self._is_let_go = False
        device.attach(self, background)

    # The methods for the event loop.

    @property
    def waiting(self) -> int:
        """Requests accepted whose batch has not begun: derived from two counts with one writer each."""
        return self._admission.requests - self._queue.taken

    @property
    def expected_wait_s(self) -> float:
        """Seconds that a new request would wait for its batch."""
        return self._admission.wait_ns(False, self._clock()) / 1e9

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """Queue one checked request: C-contiguous arrays in the spec's order, ``rows`` along the first axis.

        More rows than a batch takes are run in parts and answered as one, by one version. A caller that leaves
        cancels the future. The future raises EngineFailed where this request alone makes the engine fail, TimedOut
        where its batch has not begun in ``terms.timeout_ns``. This method raises Overloaded where the request would
        wait too long (``[batching]``: ``max_queue_size``, ``max_queue_bytes``, ``max_queue_ms``, and its own timeout),
        NotReady while draining, BadRequest where the request has more rows than ``max_request_rows``.
        """
        intake = self._intake
        if self._refusing:
            raise self._not_ready()
        if (loop := asyncio.get_running_loop()) is not self._loop:
            self._bind(loop)
        if terms is not NO_TERMS or not 0 < rows <= intake.plain_rows:
            return self._submit_special(arrays, rows, terms, intake, loop)
        now_ns = self._clock()
        if intake.shapes_differ:
            shapes = tuple([array.shape[1:] for array in arrays])
            nbytes = sum([array.nbytes for array in arrays])
        else:
            shapes, nbytes = None, 0
        self._admission.admit(rows, nbytes, now_ns)
        future = WaitingFuture(loop=loop)
        request = Request(arrays, rows, future, now_ns, shapes, nbytes)
        future.places = self._admission, (request,)
        if self._is_lonely and self._goes_alone(loop):
            self._brief_polling.asked(now_ns)
            if not self._answer_here(intake.spec, request):
                self._hand_over(intake.spec, [request])
            if future.done():
                self._brief_polling.answered(loop)
            return future
        if not self._pending:
            self._open(loop, intake.spec)
        self._pending.append(request)
        return future

    def _goes_alone(self, loop: asyncio.AbstractEventLoop) -> bool:
        """True if a request need not wait for others of this iteration of the loop: where its batch is brief, and
        the last requests came alone too. A second request in the same iteration shows that they do not."""
        if self._pending or self._ran_alone or not self._scheduler.brief:
            self._is_lonely = False
            return False
        self._ran_alone = True
        loop.call_soon(self._iterated)
        return True

    def _iterated(self) -> None:
        self._ran_alone = False

    def _submit_special(
        self,
        arrays: Sequence[np.ndarray],
        rows: int,
        terms: Terms,
        intake: Intake,
        loop: asyncio.AbstractEventLoop,
    ) -> asyncio.Future[Answer]:
        """Queue a request that has terms of its own, or is split into parts, or is refused."""
        if not 0 < rows <= intake.max_rows:
            raise self._wrong_rows(rows, intake.max_rows)
        if intake.suspicious and not intake.fits(arrays):
            raise changed(intake.spec)
        now_ns = self._clock()
        urgent = terms.priority == 1
        timeout_ns = terms.timeout_ns or intake.timeout_ns
        shapes, nbytes = intake.measured(arrays)
        self._admission.admit(rows, nbytes, now_ns, urgent, timeout_ns)
        alone = terms.deterministic
        special = urgent or alone or timeout_ns > 0
        future = WaitingFuture(loop=loop)
        request = Request(arrays, rows, future, now_ns, shapes, nbytes, special, urgent, alone)
        if timeout_ns:
            request.deadline_ns = now_ns + timeout_ns
        parts = [request]
        if rows > intake.batch_rows:
            parts = request.parts(intake.part_rows(request, self._queue.limit))
        future.places = self._admission, parts
        if timeout_ns:
            expire_after(timeout_ns, parts[0], future, loop, self.spec.name)
        if not self._pending or intake.spec is not self._pending_spec:
            self._open(loop, intake.spec)
        self._pending.extend(parts)
        return request.future

    def _open(self, loop: asyncio.AbstractEventLoop, spec: ModelSpec) -> None:
        """The requests of this iteration of the loop are handed over together at its end."""
        self._flush()
        self._pending_spec = spec
        loop.call_soon(self._flush)

    async def drain(self) -> None:
        """Refuse new work and return when everything accepted has been answered."""
        self._refusing = True
        if self._drained is None:
            self._bind(asyncio.get_running_loop())
            self._drained = asyncio.Event()
        self._flush()
        if self._device.ring() and not self._is_let_go:
            await self._drained.wait()

    def let_go(self) -> None:
        """Leave the device, which takes no turn for this batcher any more: `drain` waits for nothing then. From any
        thread."""
        self._device.detach(self)
        self._is_let_go = True  # before the event is looked at: `drain` makes it before it looks at this
        if self._drained is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._drained.set)

    def refuse(self) -> None:
        self._refusing = True

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and self._loop is not loop and not self._loop.is_closed():
            raise RuntimeError(f"the batcher of '{self.spec.name}' is used from two event loops; use one")
        self._loop = loop

    def _not_ready(self) -> NotReady:
        return NotReady(
            f"model '{self.spec.name}' is shutting down and takes no new requests; ask another server"
        )

    def _wrong_rows(self, rows: int, most: int) -> BadRequest:
        return BadRequest(
            f"inference request batch-size must be at least 1 and <= {most} for "
            f"'{self.spec.name}', got {rows}; send it as several requests"
        )

    def _flush(self) -> None:
        """Hand over the requests of this iteration of the loop."""
        if not (pending := self._pending):
            return
        self._pending = []
        self._is_lonely = len(pending) == 1
        self._hand_over(self._pending_spec, pending)

    def _hand_over(self, spec: ModelSpec, pending: list[Request]) -> None:
        self._scheduler.inbox.append((spec, pending))
        if self._scheduler.brief and not self._background and self._run_here():
            return
        if not self._device.ring():  # the thread ended between accepting and handing over
            _settle([(request, self._not_ready()) for request in pending])

    def _run_here(self) -> bool:
        """Run a batch here that takes no longer than waking another thread; after a longer one the device thread runs
        the next ones."""
        if self._long_ago:
            self._long_ago -= 1
            return False
        began_ns = self._clock()
        try:
            return self._device.run_here(self)
        finally:
            if self._clock() - began_ns > _LONG_NS:
                self._long_ago = _LONG_FOR

    def _answer_here(self, spec: ModelSpec, request: Request) -> bool:
        """True if this thread, the caller's, has answered the request past the queue. False where the request is to go
        through the queue."""
        if self._long_ago or self._background or not self._device.borrow():
            return False
        try:
            answer = self._scheduler.answer_alone(spec, request)
        finally:
            self._device.give_back()
        if answer is None:
            return False
        if answer.compute_ns > _LONG_NS:
            self._long_ago = _LONG_FOR
        request.future.set_result(answer)
        return True

    # The methods for the device thread: see `Schedulable`.

    def due_ns(self) -> int | None:
        due_ns = self._scheduler.due_ns()
        if due_ns is None and not self.computing and self._drained is not None and self.waiting == 0:
            self._on_loop(self._drained.set)
        return due_ns

    @property
    def computing(self) -> bool:
        return self._scheduler.computing

    def step(self) -> None:
        self._scheduler.step()

    def land(self) -> bool:
        return self._scheduler.land()

    def swap(self, prepared: PreparedVersion, spec: ModelSpec | None = None) -> PreparedVersion:
        """Make another version the active one and return the old one, which no batch uses any more: it may be closed.

        Only on the device thread, where no batch is under way: ``device.call(lambda: batcher.swap(prepared))``.
        Raises RuntimeError elsewhere. ``spec`` is given where the new version's limits differ. Where its inputs or
        outputs differ, the old version first answers everything that was handed over, so this takes as long.
        """
        if not self._device.here:
            raise RuntimeError("swap on the device thread: device.call(lambda: batcher.swap(prepared))")
        spec = spec or self.spec
        suspicious = self._intake.suspicious or not same_signature(spec, self.spec)
        old = self._scheduler.swap(prepared, spec)
        self.spec, self.prepared = spec, prepared
        self._intake = Intake.of(spec, suspicious)
        self._admission.read(self._intake)
        return old

    def _on_loop(self, fn: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._device.here:  # this is the event loop's thread: the batch ran on it
            fn(*arguments)
            return
        try:
            self._loop.call_soon_threadsafe(fn, *arguments)
        except RuntimeError:  # the loop is closed: its callers are gone with it
            logger.info("answers of '%s' came after the event loop was closed", self.spec.name)

    # The methods for any thread.

    def all_counters(self) -> list[Counters]:
        """A copy of the counters of every version that is or was active here."""
        return [counters.copy() for counters in list(self._scheduler.all_counters.values())]


def _settle(outcomes: Sequence[Outcome | Refused]) -> None:
    """Answer a batch's callers. A caller may have left meanwhile: to set its future would raise, and leave the
    others without an answer (ray-project/ray#41199)."""
    for request, outcome in outcomes:
        future = request.future
        if future.done():
            continue
        if isinstance(future, WaitingFuture):
            future.places = None  # which names the request, and that the future
        if isinstance(outcome, Answer):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


class BriefPolling:
    """After a brief answer to a lone caller the event loop polls for its next request for a moment before it sleeps.

    To put a core to sleep and to wake it takes as long as such a batch, and the next request finds cold caches.
    Measured on two cores with one caller that asks again at once: medians of 0.19 to 0.25 ms instead of 0.26 to 0.30.
    Linux does the same for idle processors (haltpoll) and network devices (busy polling). Each poll in vain doubles the
    number of answers that are followed by no poll.

    ``clock`` gives nanoseconds; ``idle``: whether the device thread sleeps.
    """

    def __init__(self, clock: Callable[[], int], idle: Callable[[], bool]) -> None:
        self._clock = clock
        self._idle = idle
        self._answered_ns: int | None = None  # when the last lone answer was given
        self._until_ns = 0
        self._looking = False
        self._skip = self._skipped = 0

    def asked(self, now_ns: int) -> None:
        """A request came from a lone caller."""
        if self._answered_ns is None:
            return
        if now_ns - self._answered_ns <= _AT_ONCE_NS:
            self._skip = 0
        else:
            self._skip = min(2 * self._skip + 1, _RAREST)
        self._answered_ns = None

    def answered(self, loop: asyncio.AbstractEventLoop) -> None:
        """The lone caller has its answer: poll for a moment, unless the last polls were in vain."""
        self._answered_ns = now_ns = self._clock()
        if self._skipped < self._skip:
            self._skipped += 1
            return
        self._skipped = 0
        self._until_ns = now_ns + LOOK_NS
        if not self._looking:
            self._looking = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """A ready callback keeps the loop from sleeping; the requests that came meanwhile run in between."""
        self._looking = self._clock() < self._until_ns and self._idle()
        if self._looking:
            loop.call_soon(self._look, loop)
