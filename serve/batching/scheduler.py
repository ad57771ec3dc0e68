"""The device thread's side of a batcher: from the inbox to the outcomes, with the one active version.

An engine that can launch a batch while another is computing is given the next batch ahead of time, but only a full one:
a smaller one may still fill up. Before anything else uses the device, the batches under way are finished.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...models.errors import EngineFailed, NotReady
from ...models.spec.filled_lengths import Lengths, longest_of
from ...models.spec.spec import ModelSpec
from .admission import Pace
from .condition import Condition
from .counters import Counters
from .device import DeviceThread
from .execution import Execution, Outcome
from .interface import Answer, PreparedVersion
from .request_queue import FormedBatch, Request, RequestQueue

logger = logging.getLogger("halfeven.batcher")
T = TypeVar("T")
# Callers that were answered together often ask again together. Without a short wait the first of them would be a batch
# of its own, and the others would wait for it. The wait is a small share of the batch's time, and ends early when all
# are back. After a batch so short that a timer would cost more than it saves there is no wait.
_WAIT_SHARE, _WAIT_MAX_NS, _WAIT_FROM_NS = 25, 2_000_000, 2_500_000
Refused = tuple[Request, NotReady]
Handed = tuple[ModelSpec, list[Request]]  # what one iteration of the event loop brought, checked against this


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A batch that has begun; ``failed`` where even that could not be done.

    ``computing``: the device works on it, and its end is rung; where that is not known beforehand it is False.
    """

    batch: FormedBatch
    execution: Execution
    began_ns: int
    failed: list[Outcome] | None = None
    computing: bool = False


class BatchScheduler:
    """Runs one model's batches on ``device``. All methods are the device thread's.

    ``answer`` takes the outcomes of a batch, each request once, to their callers. The event loop appends the requests
    that it hands over to ``inbox``. ``ahead``: a batch may begin while another one computes. False for a shadow and for
    live checks: they share the engine of a version, whose own callers need all of the engine's places for batches.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: DeviceThread,
        prepared: PreparedVersion,
        answer: Callable[[Sequence[Outcome | Refused]], None],
        ahead: bool = True,
    ) -> None:
        self.inbox: deque[Handed] = deque()
        self.queue = RequestQueue(limit=1, delay_ns=0)
        self.pace = Pace()
        self.all_counters = {prepared.version: Counters(prepared.version)}
        self._device = device
        self._clock = device.clock
        self._answer = answer
        self._ahead = ahead
        self._under_way: deque[_UnderWay] = deque()
        self._put_on(prepared, spec)

    def _put_on(self, prepared: PreparedVersion, spec: ModelSpec) -> None:
        self.spec, self.prepared = spec, prepared
        self._condition = Condition(spec, prepared, self._clock, lost=self._device.lose)
        self._depth = prepared.engine.in_flight if self._ahead else 1
        self.brief = prepared.engine.brief and prepared.original is None
        self.queue.delay_ns = spec.batching.max_queue_delay_us * 1000
        self.queue.batch_bytes = spec.batching.max_batch_bytes
        self._lengths = Lengths.of(spec)
        self.queue.join_lengths(self._lengths)
        self._set_limit()
        self.pace.read(spec, self.queue.limit)

    def _set_limit(self) -> None:
        """The most rows of a batch: more than the useful rows bring no throughput, or need more memory than there
        is."""
        most = max(self.spec.max_batch_size, 1)
        self.queue.limit = min(most, self.prepared.useful_rows or most)

    def refused(self) -> None:
        """A request was not admitted. From any thread."""
        counters = self._counters
        with counters.lock:
            counters.rejected += 1

    def due_ns(self) -> int | None:
        """The time when a batch may start, or one under way is to be waited for; None where there is neither."""
        while self.inbox:
            self._receive(*self.inbox.popleft())
        due_ns = self._counting_gone(self.queue.due_ns)
        if not self._under_way:
            return due_ns
        if self.computing:
            return due_ns if self._may_go_ahead else None
        since_ns = self._under_way[0].batch.requests[0].since_ns
        return since_ns if due_ns is None else min(since_ns, due_ns)

    @property
    def computing(self) -> bool:
        """True if the device works on the oldest batch under way, whose end then wakes the device thread."""
        return bool(self._under_way) and self._under_way[0].computing

    @property
    def _may_go_ahead(self) -> bool:
        """True if the next batch may begin beside those under way: only a full one, for others may still fill up."""
        return len(self._under_way) < self._depth and self.queue.fills_a_batch

    def _receive(self, spec: ModelSpec, requests: list[Request]) -> None:
        """Queue the requests that were handed over; those that were checked against an older signature are refused."""
        if spec is self.spec or same_signature(spec, self.spec):
            self.queue.add(requests)
            return
        self.queue.pass_by(requests)
        self._answer([(request, changed(self.spec)) for request in requests if request.counts])

    def step(self) -> None:
        """Begin the next batch or wait for one under way; its callers are answered together."""
        if self._under_way and not self._may_go_ahead:
            self.land()
            return
        self._begin(self._counting_gone(self.queue.form))
        if self._depth == 1:
            self.land()

    def land(self) -> bool:
        """Wait for the oldest batch under way and answer its callers. False where there is none."""
        if not self._under_way:
            return False
        one = self._under_way.popleft()
        outcomes = one.failed
        if outcomes is None:
            try:
                outcomes = one.execution.finish()
            except BaseException as error:
                outcomes = self._mistake(one.batch, error)
        self._after(one)
        if one.batch.split:
            outcomes = self._joined(outcomes)
        self._answer(outcomes)  # last: a caller that has its answer finds all counters up to date
        return True

    def answer_alone(self, spec: ModelSpec, request: Request) -> Answer | None:
        """Run a plain request, checked against ``spec``, past the queue, and count it as a batch.

        For `brief` engines, on the event loop's thread while that has the device: queue, batch and outcomes take as
        long as the run. None where other requests are before it, where it has to wait for others, or where the run
        fails: hand it to the queue then.
        """
        since_ns, rows, queue, condition = request.since_ns, request.rows, self.queue, self._condition
        if self.inbox or self._under_way or not queue.passable(since_ns):
            return None
        if spec is not self.spec or condition.lost is not None:
            return None
        began_ns = self._clock()
        outputs = condition.runner.alone(request)
        if outputs is None:
            return None
        ended_ns = self._clock()
        took_ns, assemble_ns = ended_ns - began_ns, condition.runner.engine.assemble_ns
        condition.answered(request)
        queue.pass_by((request,))
        self._counters.executed((began_ns - since_ns,), rows, took_ns, assemble_ns)
        if not self.pace.measured:  # no other request waits for a lone one: one measurement is enough
            self.pace.ended(rows, since_ns, began_ns, ended_ns, queue.limit)
        return Answer(outputs, self.prepared, began_ns - since_ns, took_ns, rows, assemble_ns)

    def _mistake(self, batch: FormedBatch, error: BaseException) -> list[Outcome]:
        """The answers where memory is lacking, or where the mistake is ours: every request gets the error."""
        logger.error("a batch of '%s' could not be run", self.spec.name, exc_info=error)
        for request in batch.requests:
            if request.part is None:  # of a divided request the last part counts
                self._counters.failed(self._clock() - request.since_ns)
        # Each request gets an exception of its own: its traceback keeps the frames of every caller that awaits it.
        words = f"{type(error).__name__}: {error}"
        return [(request, EngineFailed(words)) for request in batch.requests]

    def finish_begun(self) -> None:
        """Answer what the active version has begun: batches under way, and split requests to their last part."""
        while self.land():
            pass
        while (batch := self._counting_gone(self.queue.form_begun)).requests:
            self._begin(batch)
            self.land()

    def finish_all(self) -> None:
        """Answer all requests that have been handed over, with the active version."""
        while self.inbox:
            self._receive(*self.inbox.popleft())
        self.finish_begun()
        while self._counting_gone(self.queue.due_ns) is not None:
            self._begin(self._counting_gone(self.queue.form))
            self.land()

    def swap(self, prepared: PreparedVersion, spec: ModelSpec) -> PreparedVersion:
        """Make another version the active one and return the old one, which no batch uses any more."""
        if same_signature(spec, self.spec):
            self.finish_begun()
        else:
            self.finish_all()
        old = self.prepared
        if prepared.version not in self.all_counters:  # a rollback goes on counting
            self.all_counters[prepared.version] = Counters(prepared.version)
        self._put_on(prepared, spec)
        return old

    def _begin(self, batch: FormedBatch) -> None:
        if not batch.requests:
            return
        began_ns = self._clock()
        execution = Execution(self._counters, self._condition)
        self.pace.begins(batch.rows, began_ns)
        one = _UnderWay(batch, execution, began_ns)
        self._under_way.append(one)
        try:
            self._fill_up(batch.requests)
            execution.begin(batch.requests)
            self._watch(one)
        except BaseException as error:
            one.failed = self._mistake(batch, error)

    def _fill_up(self, requests: Sequence[Request]) -> None:
        """Give requests of different lengths that of the longest; on a CUDA device every batch has one of a few."""
        if self._lengths is None:
            return
        came = {request.shapes for request in requests if request.shapes is not None}
        shapes = longest_of(list(came)) if len(came) > 1 else came.pop()
        if self.prepared.engine.device.startswith("cuda"):
            shapes = self._lengths.shared(shapes)
        for request in requests:
            request.fill(self._lengths, shapes)

    def _watch(self, one: _UnderWay) -> None:
        """Let the device thread be rung when the batch has ended, where it computes in the background."""
        synchronize = one.execution.synchronize

        def arrived() -> None:
            one.computing = False
            self._device.ring()

        if self._depth > 1 and synchronize is not None:
            one.computing = True
            self._device.arrivals.watch(synchronize, arrived)

    def _after(self, one: _UnderWay) -> None:
        """Note how long the batch took, for the limits and waits of the next ones."""
        ended_ns = self._clock()
        batch, took_ns = one.batch, ended_ns - one.began_ns
        if len(batch.requests) > 1 and took_ns >= _WAIT_FROM_NS and self._depth == 1:
            self.queue.wait_for_more(batch.rows, ended_ns + min(took_ns // _WAIT_SHARE, _WAIT_MAX_NS))
        self._set_limit()
        oldest_ns = batch.requests[0].since_ns
        self.pace.ended(batch.rows, oldest_ns, one.began_ns, ended_ns, self.queue.limit)
        if not self._under_way:
            self.pace.rests()

    def _joined(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Each request once: a split one when its last part is answered or one part has failed."""
        joined: list[Outcome] = []
        for request, outcome in outcomes:
            if request.part is None:
                joined.append((request, outcome))
            elif (ended := request.part.request.take(request.part.index, outcome)) is not None:
                if isinstance(ended, Answer):
                    self._counters.joined(ended.queue_ns, ended.compute_ns)
                else:
                    self._counters.failed(self._clock() - request.since_ns)
                joined.append((request, ended))
        return joined

    @property
    def _counters(self) -> Counters:
        return self.all_counters[self.prepared.version]

    def _counting_gone(self, work: Callable[[], T]) -> T:
        """The result of ``work`` on the queue; the requests that it drops are counted."""
        queue = self.queue
        vanished, expired = queue.vanished, queue.expired
        result = work()
        if (vanished, expired) != (queue.vanished, queue.expired):
            counters = self._counters
            with counters.lock:
                counters.vanished += queue.vanished - vanished
                counters.timed_out += queue.expired - expired
        return result


def same_signature(one: ModelSpec, other: ModelSpec) -> bool:
    """True if requests that were checked against one spec fit the other, bounds of free dimensions included."""
    return one.inputs == other.inputs and one.outputs == other.outputs and one.batched == other.batched


def changed(spec: ModelSpec) -> NotReady:
    return NotReady(
        f"a version of model '{spec.name}' with other inputs or outputs became active while this request was on its "
        "way; read the model's metadata again and send the request as it says"
    )
