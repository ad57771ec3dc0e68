"""Batches on one engine: filled up to a bucket, cut into parts where memory is short, halved where they fail.

A batch that fails is run again in two parts, and each part in two, until only the faulty requests fail: for one faulty
request among n that takes log₂(n) rounds, and about three times the batch's own time.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from ...models.engines.engine import Engine, Launched
from ...models.engines.faults import device_answers, device_lost, give_back_cached_memory, out_of_memory
from ...models.errors import BadRequest
from ...models.spec.buckets import buckets_of
from ...models.spec.spec import ModelSpec
from .ceiling import Ceiling
from .padding import Parts, filled, filled_rows, largest_within, rows_between

logger = logging.getLogger("halfeven.batcher")


class Item(Protocol):
    """One request's share of a batch. ``alone``: it is the only request, and always run with the same shape."""

    @property
    def arrays(self) -> Sequence[np.ndarray]: ...
    @property
    def rows(self) -> int: ...
    @property
    def alone(self) -> bool: ...


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(slots=True, frozen=True)
class Fault:
    """The reason why a run gave no answer, as text: the error itself is not stored, for its traceback would hold the
    batch's memory."""

    text: str
    memory: bool = False
    lost: bool = False
    refused: bool = False  # the request's values lead to an index that a table of the model does not have


@dataclass(slots=True, eq=False)
class Run(Generic[ItemT]):
    """One run and its result: the outputs of all its items together, in the spec's order, or its fault.

    ``filled``: the rows that are run, padding included; ``shrunk``: how often the device ran out of memory.
    ``beside``: other runs may have been under way with it. ``ended``: it was waited for before its turn.
    """

    items: Sequence[ItemT]
    rows: int
    began_ns: int
    filled: int = 0
    launched: Launched | None = None
    result: list[np.ndarray] | Fault = field(default_factory=list)
    took_ns: int = 0
    assemble_ns: int = 0
    shrunk: int = 0
    beside: bool = False
    ended: bool = False


class EngineRunner:
    """One engine with its buckets and its ceiling; kept for as long as the engine is active.

    ``clock`` gives nanoseconds. Everything here is called on the thread that owns the device.
    """

    def __init__(self, spec: ModelSpec, engine: Engine, clock: Callable[[], int], ceiling: Ceiling) -> None:
        self.spec = spec
        self.engine = engine
        self.clock = clock
        self.ceiling = ceiling
        self.buckets = buckets_of(spec, engine.device)
        self._takes_ahead = engine.in_flight > 1
        self._begun: list[Run] = []
        self._beside = Ceiling()  # the most rows of a run that begins while another is under way
        self._free_ns = 0  # when the last run ended: where two are in flight, the later one began no earlier

    def begin(self, items: Sequence[ItemT]) -> Run[ItemT]:
        """Begin the run where the engine takes a batch ahead of time; else only note it. No error of the engine is
        raised."""
        run = Run(items, sum([item.rows for item in items]), self.clock())
        if self._takes_ahead and run.rows <= (most := self._most(items)):
            run.filled = self._filled(items, run.rows, most)
            # Batches of other models may compute on a CUDA device at the same time.
            run.beside = bool(self._begun) or self.engine.device.startswith("cuda")
            if not self._may_go_beside(run):
                self._begun.append(run)
                return run
            try:
                run.launched = self.engine.launch(filled(_parts(items), run.filled - run.rows))
            except BaseException as error:
                run.result = self._fault(run, error)
            run.assemble_ns = self.engine.assemble_ns
            self._begun.append(run)
        return run

    def finish(self, run: Run[ItemT]) -> Run[ItemT]:
        """The run with its outputs, cut to its own rows and checked against the spec, or with its fault. No error of
        the engine is raised."""
        if run in self._begun:
            self._begun.remove(run)
        if run.launched is not None:
            self._wait(run)
        elif not run.ended and not isinstance(run.result, Fault):
            run.result = self._at_once(run)
            run.assemble_ns = self.engine.assemble_ns
        if run.beside and _ran_out(run):
            run.result = self._alone_on_the_device(run)
        if run.filled and _ran_out(run) and self._shrink(run, run.filled):
            run.result = self._in_parts(run)
        now_ns = self.clock()
        run.took_ns = now_ns - max(run.began_ns, self._free_ns)
        self._free_ns = now_ns
        return run

    def _may_go_beside(self, run: Run) -> bool:
        """True if the run may begin while earlier runs are under way, whose memory is taken meanwhile."""
        if not self._begun:
            return True
        in_order = all(other.launched is not None for other in self._begun)
        return in_order and run.filled <= self._beside.rows(_row_elements(run.items))

    def _wait(self, run: Run) -> None:
        assert run.launched is not None
        run.result = self._attempt(run, run.launched.wait, run.rows, run.filled)
        run.launched = None

    def _alone_on_the_device(self, run: Run) -> list[np.ndarray] | Fault:
        """Run a batch again with nothing beside it: rows that fit alone are no reason for a ceiling."""
        for other in self._begun:
            if other.launched is not None:
                self._wait(other)
                other.ended = True
        give_back_cached_memory()
        parts = filled(_parts(run.items), run.filled - run.rows)
        result = self._attempt(run, lambda: self.engine.run(parts), run.rows, run.filled)
        if isinstance(result, list):
            self._beside.lower(_row_elements(run.items), run.filled // 2)
            logger.warning("'%s' has memory for %d rows only one batch at a time", self.spec.name, run.filled)
        return result

    def alone(self, item: Item) -> list[np.ndarray] | None:
        """One item's outputs, run without padding. None where it has to be filled up or cut, or where the run failed:
        run it as a batch then, which gives the fault.
        """
        if self.buckets or self.ceiling.known or self._takes_ahead:
            return None
        try:
            return self._checked(self.engine.run([(array,) for array in item.arrays]), item.rows, item.rows)
        except BaseException:
            return None

    def run(self, items: Sequence[ItemT]) -> Run[ItemT]:
        """One batch from begin to end, at once."""
        return self.finish(Run(items, sum([item.rows for item in items]), self.clock()))

    def isolated(self, run: Run[ItemT], until_ns: int) -> Iterator[Run[ItemT]]:
        """A failed run divided into two parts, again and again, until each part succeeds or has one item. After
        ``until_ns`` nothing is divided."""
        if not isinstance(run.result, Fault) or run.result.lost or len(run.items) == 1:
            yield run
        elif self.clock() > until_ns:
            run.result = Fault(f"{run.result.text} (finding whose request it was took too long)")
            yield run
        else:
            middle = len(run.items) // 2
            for half in (run.items[:middle], run.items[middle:]):
                yield from self.isolated(self.run(half), until_ns)

    def _at_once(self, run: Run[ItemT]) -> list[np.ndarray] | Fault:
        items, rows = run.items, run.rows
        most = self._most(items)
        if rows > most:
            return self._in_parts(run)
        run.filled = ran = self._filled(items, rows, most)
        return self._attempt(run, lambda: self.engine.run(filled(_parts(items), ran - rows)), rows, ran)

    def _in_parts(self, run: Run[ItemT]) -> list[np.ndarray] | Fault:
        """All rows, in as few parts as the ceiling allows; it sinks where the device runs out of memory."""
        parts, start = _parts(run.items), 0
        most = self._most(run.items)
        done: list[list[np.ndarray]] = []
        while start < run.rows:
            rows = min(run.rows - start, most)
            ran = self._filled(run.items, rows, most)
            part = filled(parts if rows == run.rows else rows_between(parts, start, start + rows), ran - rows)
            outputs = self._attempt(run, lambda part=part: self.engine.run(part), rows, ran)
            if isinstance(outputs, list):
                done.append(outputs)
                start += rows
            elif outputs.memory and self._shrink(run, ran):
                most = self._most(run.items)
            else:
                return outputs
        return done[0] if len(done) == 1 else [np.concatenate(pieces) for pieces in zip(*done, strict=True)]

    def _attempt(
        self, run: Run[ItemT], outputs_of: Callable[[], list[np.ndarray]], rows: int, ran: int
    ) -> list[np.ndarray] | Fault:
        try:
            return self._checked(outputs_of(), rows, ran)
        except BaseException as error:  # SystemExit from a model's own code is a failed run as well
            return self._fault(run, error)

    def _fault(self, run: Run[ItemT], error: BaseException) -> Fault:
        refused = isinstance(error, BadRequest)
        logger.log(
            logging.DEBUG if refused else logging.WARNING,
            "a batch of %d requests to '%s' failed: %s", len(run.items), self.spec.name, type(error).__name__,
            exc_info=error if len(run.items) == 1 else None,  # of a larger batch, its parts will log theirs
        )  # fmt: skip
        text = str(error) if refused else f"{type(error).__name__}: {error}"
        lost = device_lost(error) or not (refused or device_answers(error, self.engine.device))
        return Fault(text, memory=out_of_memory(error), lost=lost, refused=refused)

    def _shrink(self, run: Run[ItemT], tried: int) -> bool:
        """Lower the ceiling to half of the ``tried`` rows. False where no smaller batch can be tried."""
        give_back_cached_memory()
        run.shrunk += 1
        if tried <= 1 or not self.spec.batched:
            return False
        self.ceiling.lower(_row_elements(run.items), tried // 2)
        logger.warning(
            "'%s' ran out of memory with %d rows: now at most %d", self.spec.name, tried, tried // 2
        )
        return True

    def _most(self, items: Sequence[Item]) -> int:
        if not self.ceiling.known or not self.spec.batched:
            return sys.maxsize
        return largest_within(self.buckets, self.ceiling.rows(_row_elements(items)))

    def _filled(self, items: Sequence[Item], rows: int, most: int) -> int:
        if items[0].alone and self.spec.batched:
            return max(min(self.spec.max_batch_size, most), rows)
        return filled_rows(self.buckets, rows, most) if self.buckets else rows

    def _checked(self, outputs: list[np.ndarray], rows: int, ran: int) -> list[np.ndarray]:
        """The outputs without the padding rows. Raises ValueError where they do not have the spec's number and rows."""
        wanted = self.spec.outputs
        if len(outputs) != len(wanted):
            raise ValueError(f"the engine returned {len(outputs)} outputs, expected {len(wanted)}")
        if not self.spec.batched:
            return outputs
        for spec, output in zip(wanted, outputs, strict=True):
            if output.ndim == 0 or output.shape[0] != ran:
                raise ValueError(
                    f"output '{spec.name}' has shape {list(output.shape)} for a batch of {ran} rows; "
                    f"expected {ran} as its first dimension"
                )
        return outputs if ran == rows else [output[:rows] for output in outputs]


def _ran_out(run: Run) -> bool:
    return isinstance(run.result, Fault) and run.result.memory


def _parts(items: Sequence[Item]) -> Parts:
    return list(zip(*[item.arrays for item in items], strict=True))


def _row_elements(items: Sequence[Item]) -> int:
    first = items[0]
    return sum([array.size for array in first.arrays]) // max(first.rows, 1)
