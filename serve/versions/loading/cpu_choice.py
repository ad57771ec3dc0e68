"""The threads and passes of an engine on a CPU are chosen by trying: each is tried on this machine beside the best
found so far.

The search begins with the plain program on one core and measures several sizes of batch. A pass is taken where it gains
on the original and no size of batch loses by it. `kept_setups` keeps the result.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ....models.engines.cpu.row_shares import FEWEST_SHARED, LONG_ROW_SECONDS
from ....models.engines.cpu.setup import (
    BRIEF_SPINNING,
    NO_SPINNING,
    PACKED_CONVOLUTIONS,
    PACKED_PRODUCTS,
    SHARED_ROWS,
    WITHOUT_LOCK,
    CpuSetup,
    usable_cores,
)
from ....models.engines.engine import SHORT_SECONDS, Engine
from ....models.errors import NotReady
from ....models.machine.core_wait import Crowding, seconds_on_core

logger = logging.getLogger("halfeven.roster")
Parts = Sequence[Sequence[np.ndarray]]
Call = Callable[[Callable[[], Any]], Any]  # runs a function on the device thread, and waits for it

# A pass is taken where batches are at least this many times as fast with it.
MUST_GAIN = {
    PACKED_CONVOLUTIONS: 1.03,
    PACKED_PRODUCTS: 1.03,
    # The gain of this one is not seen here: beside a busy event loop an encoder's batch of 8 takes 0.07 s instead of
    # 0.86 s.
    WITHOUT_LOCK: 0.97,
    SHARED_ROWS: 0.99,
    # The gain of these is not seen here either: threads that spin take the core of another program, and lose with it.
    BRIEF_SPINNING: 0.97,
    NO_SPINNING: 0.97,
}
MORE_THREADS_MUST_GAIN = 1.1  # each further thread takes a core from HTTP and from other models
MAY_LOSE = 0.95  # at one size of batch; less is noise
# A pass measured beside other programs is taken unless it seems twice as slow: it gains on most processors, the other
# program decides what is measured, and what serves is measured again.
_CROWDED_MAY_LOSE = 0.5
_LONG_SECONDS = 0.05  # of one batch: such a batch is measured twice, a shorter one four times
_LARGEST_SECONDS = 0.4  # larger batches are not measured, and a single row that lasts longer is measured once
_SPINNING_ENDS_SECONDS = 0.005
CROWDED = 0.1  # of the time waited for a core: then other programs disturb, and the result is not kept


@dataclass(frozen=True, slots=True)
class TimedSetup:
    """A setup, and the seconds of one batch by its rows (0 rows: not batched): the shortest, and of all ``runs``."""

    setup: CpuSetup
    seconds: dict[int, float]
    runs: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, setup: CpuSetup, runs: dict[int, list[float]]) -> "TimedSetup":
        return cls(setup, {rows: min(taken) for rows, taken in runs.items()}, runs)

    def add(self, rows: int, taken: float) -> None:
        self.runs.setdefault(rows, []).append(taken)
        self.seconds[rows] = min(self.runs[rows])

    def gains_over(self, other: "TimedSetup") -> list[float]:
        """The ratio of this setup's speed to the other's, at each size."""
        return [other.seconds[rows] / taken for rows, taken in self.seconds.items()]


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """The setup to serve with, all measurements, and whether other programs disturbed them too much to be kept."""

    setup: CpuSetup
    measured: tuple[TimedSetup, ...]
    crowded: bool = False


def choose_setup(
    load: Callable[[CpuSetup], Engine], batch_of: Callable[[int], Parts], most_rows: int, call: Call
) -> CpuChoice:
    """Try the threads and passes that ``load``'s engines allow, at batches of up to ``most_rows`` (0: not batched).

    Raises what loading or running the plain program raises. A setup that fails is logged and not taken.
    """
    search = _SetupSearch(load, batch_of, most_rows, call)
    try:
        search.settle_threads()
        for name in MUST_GAIN:
            search.try_pass(name)
    finally:
        search.close()
    return CpuChoice(search.best.setup, tuple(search.measured), search.crowding.disturbance() > CROWDED)


class _SetupSearch:
    """The best engine so far, warm, and every measurement. ``crowding``: what disturbed them; it counts while engines
    are measured, because the waits of an engine's threads cannot be read after it was closed."""

    def __init__(
        self, load: Callable[[CpuSetup], Engine], batch_of: Callable[[int], Parts], most_rows: int, call: Call
    ) -> None:
        self._load, self._batch_of, self._call = load, batch_of, call
        self.crowding = Crowding(at_once=False)
        sizes = sorted({1, min(FEWEST_SHARED, most_rows), most_rows}) if most_rows else [0]
        self._engine = load(CpuSetup(threads=1))
        try:
            with self.crowding.counted():
                self.best = TimedSetup.of(CpuSetup(threads=1), self._first_runs(sizes))
        except BaseException:
            self.close()
            raise
        self.measured = [self.best]

    def close(self) -> None:
        self._call(self._engine.close)

    def settle_threads(self) -> None:
        """One thread where a batch ends before a second thread has begun; else every core where that gains.

        Where other programs use the cores, more threads measure worse than they are: there they are taken. Where the
        quota of the group is used up they are not: more threads use it up sooner.
        """
        cores, largest = usable_cores(), max(self.best.seconds)
        if cores == 1 or self.best.seconds[largest] < SHORT_SECONDS:
            return
        crowding = Crowding()
        self._try(
            CpuSetup(threads=cores),
            lambda gains: crowding.share() > CROWDED or mean(gains) >= MORE_THREADS_MUST_GAIN,
        )

    def try_pass(self, name: str) -> None:
        """Take the pass where the program allows it and it gains what `MUST_GAIN` asks for."""
        crowding = Crowding()

        def is_better(gains: list[float]) -> bool:
            if crowding.share() > CROWDED:
                return mean(gains) >= _CROWDED_MAY_LOSE
            return min(gains) >= MAY_LOSE and mean(gains) >= MUST_GAIN[name]

        if name in self._engine.possible and (name != SHARED_ROWS or self._has_long_rows()):
            self._try(self.best.setup.having(name), is_better)

    def _has_long_rows(self) -> bool:
        rows = max(self.best.seconds)
        on_one_core = self.best.seconds[rows] * self.best.setup.threads / max(rows, 1)
        return rows >= FEWEST_SHARED and on_one_core >= LONG_ROW_SECONDS

    def _try(self, setup: CpuSetup, is_better: Callable[[list[float]], bool]) -> None:
        engine = None
        try:
            engine = self._load(setup)
            if engine.setup == setup:  # else the program does not allow it
                with self.crowding.counted():
                    timed = self._beside_best(engine, setup)
                self.measured.append(timed)
                if is_better(timed.gains_over(self.best)):
                    self.best, engine, self._engine = timed, self._engine, engine
        except NotReady:  # the server is stopping
            raise
        except Exception:
            logger.exception("a program does not run with %s", setup)
        if engine is not None:
            self._call(engine.close)

    def _first_runs(self, sizes: list[int]) -> dict[int, list[float]]:
        """A run of the plain program by rows, smallest batch first, as long as the next one ends soon."""
        runs: dict[int, list[float]] = {}
        row_s = 0.0
        for rows in sizes:
            if row_s * rows > _LARGEST_SECONDS:
                break
            taken = self._seconds(self._engine, rows)  # fills caches
            if taken <= _LARGEST_SECONDS:
                taken = self._seconds(self._engine, rows)
            runs[rows] = [taken]
            row_s = taken / max(rows, 1)
        return runs

    def _beside_best(self, engine: Engine, setup: CpuSetup) -> TimedSetup:
        """Some runs, alternating with the best engine's, so that a disturbance meets both."""
        found = TimedSetup(setup, {})
        for rows, best_s in list(self.best.seconds.items()):
            found.add(rows, self._seconds(engine, rows))  # fills caches
            for _ in range(_rounds(best_s)):
                found.add(rows, self._undisturbed_seconds(engine, rows, best_s))
                self.best.add(rows, self._undisturbed_seconds(self._engine, rows, best_s))
        return found

    def _undisturbed_seconds(self, engine: Engine, rows: int, about_s: float) -> float:
        """Seconds of a batch that begins when no thread of the engine before spins any more, and its own are awake."""
        if engine.form == "onnx" and about_s <= _LONG_SECONDS:
            time.sleep(_SPINNING_ENDS_SECONDS)
            self._seconds(engine, rows)
        return self._seconds(engine, rows)

    def _seconds(self, engine: Engine, rows: int) -> float:
        return self._call(partial(batch_seconds, engine, self._batch_of(rows)))


def batch_seconds(engine: Engine, parts: Parts) -> float:
    """Seconds on a core of one batch, run as the server does. Called on the device thread."""
    if engine.in_flight == 1:
        return seconds_on_core(partial(engine.run, parts))
    return seconds_on_core(partial(_two_at_once, engine, parts)) / 2


def _two_at_once(engine: Engine, parts: Parts) -> None:
    """The next batch is begun while one is under way."""
    for launched in [engine.launch(parts), engine.launch(parts)]:
        launched.wait()


def _rounds(seconds: float) -> int:
    return 4 if seconds <= _LONG_SECONDS else 2 if seconds <= _LARGEST_SECONDS else 0


def mean(gains: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, gains)) / len(gains))
