"""Rounds of measurements, taken in small steps between live batches, until two of them agree.

Everything here is a generator: each step lasts as long as one short batch, and yields the seconds to leave to others.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ....models.engines.engine import Engine
from ....models.machine.core_wait import Crowding
from ..loading.cpu_choice import CROWDED, Parts, TimedSetup
from ..loading.tuned import Way
from .budget import MeasuringBudget
from .rivals import wins

T = TypeVar("T")
Steps = Generator[float, None, T]

SHORT_S = 0.05  # of what is run between live batches
MOST_ROUNDS = 5  # where no two in a row agree, what serves stays
_PAIRS = 2  # of runs at each size in a round
_HOPELESS = 2.0  # times as slow: the larger sizes are not run
_FIRST_RUN = 20.0  # times as long as the active engine's run: no one-time work takes that
_WARM_S = 0.025  # a shorter batch is run once more: the last one left another engine's weights in the caches
_BRIEF_S, _MOST_RUNS = 0.002, 10  # of brief batches more runs are needed to see a difference
_IDLE_PAUSE_S = 0.005  # in which threads of the engine before stop spinning
_LEFT_TO_OTHERS = 3  # live batches get this many times as long as the measuring before them


@dataclass(frozen=True, slots=True)
class BatchToTime:
    """A batch of ``rows`` that an engine is to run; ``taken`` gets its seconds."""

    engine: Engine
    rows: int
    taken: TimedSetup


@dataclass(slots=True)
class Stopwatch:
    """Times batches on the device thread (``call``), between live ones, and takes their cost from the budget.

    ``idle``: whether the device has nothing to do. ``batch_seconds`` as `loading.cpu_choice.batch_seconds`. ``clock``
    gives seconds; ``own_clock`` the processor seconds of the thread that takes the steps: looking for what disturbs
    takes some, with many threads and processes more than a brief batch. ``allowed`` raises where nothing may be run any
    more. ``crowding`` begins to measure what disturbs: of the runs alone, not of the long pauses between them that the
    budget asks for.
    """

    call: Callable[[Callable[[], float]], float]
    batch_of: Callable[[int], Parts]
    batch_seconds: Callable[[Engine, Parts], float]
    budget: MeasuringBudget
    idle: Callable[[], bool]
    clock: Callable[[], float]
    crowding: Callable[[bool], Crowding]
    allowed: Callable[[], None] = lambda: None
    own_clock: Callable[[], float] = time.thread_time
    _meanwhile: Crowding = field(init=False)

    def __post_init__(self) -> None:
        self.anew()

    def anew(self) -> None:
        """Forget what disturbed the runs so far."""
        with self._spent():
            self._meanwhile = self.crowding(False)

    def was_disturbed(self) -> bool:
        """True if other programs, other guests or the quota took cores from the runs since `anew`."""
        with self._spent():
            return self._meanwhile.disturbance() > CROWDED

    @contextmanager
    def _spent(self) -> Iterator[None]:
        """The processor time that the calling thread takes in the block is of the budget."""
        began_s = self.own_clock()
        try:
            yield
        finally:
            self.budget.spend(self.own_clock() - began_s)

    def time(self, *jobs: BatchToTime) -> Steps[None]:
        """Run the jobs in order, as soon as the budget allows it: as many in one step as end within `SHORT_S`, at least
        one."""
        left = deque(jobs)
        while left:
            while wait_s := self.budget.wait_s():
                yield wait_s
            at_rest = self.idle()
            with self._spent(), self._meanwhile.counted():
                held_s = self.call(partial(self._run_some, left))
            yield _IDLE_PAUSE_S if at_rest else max(_IDLE_PAUSE_S, _LEFT_TO_OTHERS * held_s)

    def _run_some(self, left: deque[BatchToTime]) -> float:
        """The seconds that callers had to wait meanwhile: on a crowded machine far more than on a core."""
        self.allowed()
        began_s = self.clock()
        held_s = 0.0
        while left and (held_s == 0.0 or not self._too_long_after(held_s, left[0])):
            job = left.popleft()
            parts = self.batch_of(job.rows)
            runs = [self.batch_seconds(job.engine, parts)]
            while runs[0] <= _WARM_S and (
                len(runs) == 1 or (sum(runs) < _BRIEF_S and len(runs) < _MOST_RUNS)
            ):
                runs.append(self.batch_seconds(job.engine, parts))
            job.taken.add(job.rows, min(runs[1:] or runs))
            before_s, held_s = held_s, self.clock() - began_s
            self.budget.spend(max(sum(runs) * max(job.taken.setup.threads, 1), held_s - before_s))
        return held_s

    def _too_long_after(self, held_s: float, job: BatchToTime) -> bool:
        """True if the job is for the next step: callers come first, or threads of ONNX Runtime still spin."""
        about_s = 2 * job.taken.seconds.get(job.rows, held_s)
        return job.engine.form == "onnx" or held_s + about_s > SHORT_S


@dataclass(frozen=True, slots=True)
class Side:
    """An engine of a contest, and what its batches took."""

    way: Way
    engine: Engine
    taken: TimedSetup


@dataclass(slots=True)
class Verdict:
    """``wins``: whether the rival has to take the place. ``gain``: how many times as fast it was, in the mean.
    ``live``: measured by live traffic, whose batches had ``live_rows`` rows in the mean with the rival.
    ``crowded``: other programs, or traffic that changed meanwhile, disturbed it."""

    wins: bool = False
    rounds: int = 0
    gain: float = 0.0
    crowded: bool = False
    live: bool = False
    live_rows: float = 0.0
    outcomes: list[bool] = field(default_factory=list)


def contest(
    active: Side,
    rival: Side,
    sizes: Sequence[int],
    watch: Stopwatch,
    mean: Callable[[list[float]], float],
) -> Steps[Verdict]:
    """Run the two in turns, small batches first, until two rounds in a row agree."""
    verdict = Verdict()
    while verdict.rounds < MOST_ROUNDS:
        watch.anew()
        gains = yield from round_gains(active, rival, sizes, watch, is_first=verdict.rounds == 0)
        crowded = watch.was_disturbed()
        verdict.rounds, verdict.gain = verdict.rounds + 1, mean(gains)
        verdict.crowded = verdict.crowded or crowded
        verdict.outcomes.append(wins(active.way, rival.way, gains, crowded, live=False))
        if verdict.outcomes[-2:] in ([True, True], [False, False]):
            verdict.wins = verdict.outcomes[-1]
            break
    return verdict


def round_gains(
    active: Side, rival: Side, sizes: Sequence[int], watch: Stopwatch, is_first: bool
) -> Steps[list[float]]:
    """The ratio of the rival's speed to the active engine's in this round, at each size until the rival is hopeless."""
    gains: list[float] = []
    for rows in sizes:
        mine, theirs = TimedSetup(active.way.setup, {}), TimedSetup(rival.way.setup, {})
        if is_first:  # the rival's one-time work is not counted
            first = TimedSetup(rival.way.setup, {})
            yield from watch.time(
                BatchToTime(rival.engine, rows, first), BatchToTime(active.engine, rows, mine)
            )
            if first.seconds[rows] > _FIRST_RUN * mine.seconds[rows]:
                rival.taken.add(rows, first.seconds[rows])
                return [*gains, mine.seconds[rows] / first.seconds[rows]]
        pair = BatchToTime(rival.engine, rows, theirs), BatchToTime(active.engine, rows, mine)
        yield from watch.time(*pair * _PAIRS)
        for side, found in ((active, mine), (rival, theirs)):
            for taken in found.runs[rows]:
                side.taken.add(rows, taken)
        gains.append(mine.seconds[rows] / theirs.seconds[rows])
        if gains[-1] * _HOPELESS < 1.0:
            break
    return gains
