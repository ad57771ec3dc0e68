"""One batch on one version: run it, give each request its rows, or its own failure.

A batch that fails is run again in two parts (`engine_runner.py`); rows that a half could not compute are answered by
the original (`rescue.py`). No request fails because of another one.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...models.errors import BadRequest, EngineFailed, HalfevenError, TimedOut
from .condition import Condition
from .counters import Counters
from .engine_runner import Fault, Run
from .interface import Answer
from .request_queue import Request
from .rescue import Mended

Outcome = tuple[Request, Answer | EngineFailed | TimedOut | BadRequest]


class Execution:
    """One batch with exactly one version. ``condition`` is what the version's batches share."""

    def __init__(self, counters: Counters, condition: Condition) -> None:
        self.counters = counters
        self.condition = condition
        self.prepared = condition.prepared
        self.clock = condition.runner.clock

    def begin(self, batch: list[Request]) -> None:
        """Start the batch where the engine takes a batch ahead of time; else `finish` runs it."""
        self._batch = batch
        self._run = Run(batch, 0, self.clock()) if self.condition.lost else self.condition.runner.begin(batch)

    @property
    def synchronize(self) -> Callable[[], None] | None:
        """A function that blocks until the device has ended the batch and may be called on any thread; None where the
        batch is run or waited for by `finish` alone."""
        return getattr(self._run.launched, "synchronize", None)

    def finish(self) -> list[Outcome]:
        """Each request of the batch once, with its answer or its own failure. No error of the engine is raised."""
        if self.condition.lost is not None:
            return self._all_failed(self._batch, self.condition.lost)
        run = self.condition.runner.finish(self._run)
        if isinstance(run.result, Fault):
            return self._after_failure(run, run.result)
        return self._answers(run, run.result)

    def _after_failure(self, run: Run[Request], fault: Fault) -> list[Outcome]:
        condition = self.condition
        if fault.lost:
            return self._all_failed(self._batch, condition.device_lost(fault.text))
        if not condition.worth_dividing():
            condition.nobody_answered()
            self.counters.gave_up()
            return self._all_failed(self._batch, self._broken(fault))
        until_ns = self.clock() + condition.patience_ns(run.took_ns)
        outcomes: list[Outcome] = []
        for part in condition.runner.isolated(run, until_ns):
            found = part.result
            outcomes += (
                self._failed_run(part, found) if isinstance(found, Fault) else self._answers(part, found)
            )
            if condition.lost is not None:  # lost meanwhile: the requests that are left are not run
                return outcomes + self._all_failed(self._batch[len(outcomes) :], condition.lost)
        if not any(isinstance(outcome, Answer | BadRequest) for _, outcome in outcomes):
            condition.nobody_answered()
        return outcomes

    def _answers(self, run: Run[Request], outputs: list[np.ndarray]) -> list[Outcome]:
        """The answers of a run that succeeded, with the rows that had to be rescued."""
        batch, condition, prepared = run.items, self.condition, self.prepared
        if run.shrunk:
            condition.note_ceiling()
            self.counters.ran_out(run.shrunk, condition.ceiling.smallest)
        condition.answered(batch[0])
        waits_ns = [run.began_ns - request.since_ns for request in batch]
        mended = condition.mended(batch, outputs, run.took_ns)  # before the rows are handed out
        took_ns, rows, assemble_ns = run.took_ns, run.rows, run.assemble_ns
        shares: Iterable[list[np.ndarray]] = _split(outputs, batch)
        if any(request.given is not None for request in batch):
            shares = map(Request.own, batch, shares)
        answers: list[Outcome] = [
            (request, Answer(share, prepared, wait_ns, took_ns, rows, assemble_ns))
            for request, share, wait_ns in zip(batch, shares, waits_ns, strict=True)
        ]
        for index, how in mended.items():
            answers[index] = self._mended(*answers[index], how)
        answered = [
            wait_ns
            for (request, outcome), wait_ns in zip(answers, waits_ns, strict=True)
            if request.part is None and isinstance(outcome, Answer)
        ]
        self.counters.executed(answered, rows, took_ns, assemble_ns)
        return answers

    def _mended(self, request: Request, answer: Answer | HalfevenError, how: Mended) -> Outcome:
        """The request's answer with its rescued rows, or why it has none."""
        if how.late:
            return self._failed(request, TimedOut(self._too_late()))
        if how.fault is not None:
            if how.fault.lost:
                self.condition.device_lost(how.fault.text)
            return self._failed(request, EngineFailed(self._not_rescued(how.fault)))
        assert isinstance(answer, Answer)
        self.counters.rescued(how.rows)
        answer.rescued = how.rows
        answer.compute_ns += how.took_ns
        return request, answer

    def _failed_run(self, run: Run[Request], fault: Fault) -> list[Outcome]:
        """The requests of a run that failed, each with the fault."""
        if run.shrunk:
            self.condition.note_ceiling()
            self.counters.ran_out(run.shrunk, self.condition.ceiling.smallest)
        if fault.lost:
            self.condition.device_lost(fault.text)
        if fault.refused and len(run.items) == 1:
            return [self._refused(run.items[0], fault)]
        return [
            self._failed(request, EngineFailed(self._describe(request, fault, run))) for request in run.items
        ]

    def _refused(self, request: Request, fault: Fault) -> Outcome:
        """An index that a half computed may be out of range by its rounding alone: the original decides."""
        found = self.condition.of_the_original(request)
        if found is None or isinstance(found.result, Fault):
            return self._failed(request, BadRequest(f"{self._who()}: {fault.text}"))
        wait_ns = found.began_ns - request.since_ns
        self.counters.executed([wait_ns] if request.part is None else [], found.rows, found.took_ns)
        share = Answer(request.own(found.result), self.prepared, wait_ns, found.took_ns, found.rows)
        self.counters.rescued(request.rows)
        share.rescued = request.rows
        return request, share

    def _all_failed(self, batch: Iterable[Request], why: str) -> list[Outcome]:
        return [self._failed(request, EngineFailed(why)) for request in batch]

    def _failed(self, request: Request, error: EngineFailed | TimedOut | BadRequest) -> Outcome:
        if request.part is None:
            self.counters.failed(self.clock() - request.since_ns)
        return request, error

    def _describe(self, request: Request, fault: Fault, run: Run) -> str:
        if len(run.items) > 1:
            return f"{self._who()} failed on a batch of {len(run.items)} requests with this one: {fault.text}"
        shapes = ", ".join(str(list(array.shape)) for array in request.as_given)
        return (
            f"{self._who()} failed on this request, which was run alone (input shapes {shapes}): {fault.text}. "
            "The rest of its batch was not affected; try other values, and see the server's log for the traceback"
        )

    def _broken(self, fault: Fault) -> str:
        return (
            f"{self._who()} fails on every request, and now also on one that it answered before: {fault.text}. Nothing "
            "is looked for in its batches until it answers again; load it again, or roll back"
        )

    def _not_rescued(self, fault: Fault) -> str:
        return (
            f"{self._who()} has no finite answer to this request, and its FP32 original, which was asked instead, "
            f"failed: {fault.text}"
        )

    def _too_late(self) -> str:
        return (
            f"{self._who()} has no finite answer to this request, and the time it may take was over before its FP32 "
            "original could be asked; allow more time, or smaller values"
        )

    def _who(self) -> str:
        name, prepared = self.condition.runner.spec.name, self.prepared
        return f"version {prepared.version} of model '{name}' ({prepared.precision})"


def _split(outputs: list[np.ndarray], batch: Sequence[Request]) -> list[list[np.ndarray]]:
    """Each request's rows of every output, as views."""
    if len(batch) == 1:
        return [outputs]
    shares, start = [], 0
    for request in batch:
        stop = start + request.rows
        shares.append([output[start:stop] for output in outputs])
        start = stop
    return shares
