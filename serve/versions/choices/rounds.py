"""Rounds of measurements, taken in small steps between live batches, until two of them agree.

Everything here is a generator: each step is at most one short batch, and yields the seconds to leave to others.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ....models.engines.engine import Engine
from ...batching.core_wait import Crowding
from ..loading.cpu_choice import CROWDED, Parts, Timed
from ..loading.tuned import Way
from .budget import Budget
from .rivals import wins

T = TypeVar("T")
Steps = Generator[float, None, T]

MOST_ROUNDS = 5  # where no two in a row agree, what serves stays
_PAIRS = 2  # of runs at each size in a round
_HOPELESS = 2.0  # times as slow: the larger sizes are not run
_FIRST_RUN = 20.0  # times as long as the active engine's run: no one-time work takes that
_WARM_S = 0.025  # a shorter batch is run once more: the last one left another engine's weights in the caches
_IDLE_PAUSE_S = 0.005  # in which threads of the engine before stop spinning
_TURNS = 3  # live batches get this many times as long as the measuring before them


@dataclass(slots=True)
class Stopwatch:
    """Times one batch at a time on the device thread (``call``), and takes its cost from the budget.

    ``idle``: whether the device has nothing to do. ``batch_seconds`` as `cpu_choice.batch_seconds`.
    """

    call: Callable[[Callable[[], float]], float]
    batch_of: Callable[[int], Parts]
    batch_seconds: Callable[[Engine, Parts], float]
    budget: Budget
    idle: Callable[[], bool]
    allowed: Callable[[Engine], None] = lambda engine: None  # raises where the engine may not be run any more

    def time(self, engine: Engine, rows: int, taken: Timed) -> Steps[float]:
        """Add a batch's seconds to ``taken``, as soon as the budget allows it."""
        while wait_s := self.budget.wait_s():
            yield wait_s
        parts, spent = self.batch_of(rows), list[float]()
        at_rest = self.idle()

        def run() -> float:
            self.allowed(engine)
            spent.append(self.batch_seconds(engine, parts))
            if spent[0] <= _WARM_S:
                spent.append(self.batch_seconds(engine, parts))
            return spent[-1]

        found = self.call(run)
        self.budget.spend(sum(spent) * max(taken.setup.threads, 1))
        taken.add(rows, found)
        yield _IDLE_PAUSE_S if at_rest else max(_IDLE_PAUSE_S, _TURNS * sum(spent))
        return found


@dataclass(frozen=True, slots=True)
class Side:
    """An engine of a contest, and what its batches took."""

    way: Way
    engine: Engine
    taken: Timed


@dataclass(slots=True)
class Verdict:
    """``wins``: whether the rival has to take the place. ``gain``: how many times as fast it was, in the mean."""

    wins: bool = False
    rounds: int = 0
    gain: float = 0.0
    crowded: bool = False
    outcomes: list[bool] = field(default_factory=list)


def contest(
    active: Side,
    rival: Side,
    sizes: Sequence[int],
    watch: Stopwatch,
    crowding: Callable[[], Crowding],
    mean: Callable[[list[float]], float],
) -> Steps[Verdict]:
    """Run the two in turns, small batches first, until two rounds in a row agree."""
    verdict = Verdict()
    while verdict.rounds < MOST_ROUNDS:
        meanwhile = crowding()
        gains = yield from _gains(active, rival, sizes, watch, is_first=verdict.rounds == 0)
        crowded = meanwhile.disturbance() > CROWDED
        verdict.rounds, verdict.gain = verdict.rounds + 1, mean(gains)
        verdict.crowded = verdict.crowded or crowded
        verdict.outcomes.append(wins(active.way, rival.way, gains, crowded))
        if verdict.outcomes[-2:] in ([True, True], [False, False]):
            verdict.wins = verdict.outcomes[-1]
            break
    return verdict


def _gains(
    active: Side, rival: Side, sizes: Sequence[int], watch: Stopwatch, is_first: bool
) -> Steps[list[float]]:
    """How many times as fast the rival was in this round, at each size as long as it is not hopeless."""
    gains: list[float] = []
    for rows in sizes:
        mine, theirs = Timed(active.way.setup, {}), Timed(rival.way.setup, {})
        if is_first:  # the rival's one-time work is not counted
            first_s = yield from watch.time(rival.engine, rows, Timed(rival.way.setup, {}))
            if first_s > _FIRST_RUN * (yield from watch.time(active.engine, rows, mine)):
                return [*gains, mine.seconds[rows] / first_s]
        for _ in range(_PAIRS):
            yield from watch.time(rival.engine, rows, theirs)
            yield from watch.time(active.engine, rows, mine)
        for side, found in ((active, mine), (rival, theirs)):
            for taken in found.runs[rows]:
                side.taken.add(rows, taken)
        gains.append(mine.seconds[rows] / theirs.seconds[rows])
        if gains[-1] * _HOPELESS < 1.0:
            break
    return gains
