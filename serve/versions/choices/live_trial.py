"""Two ways of serving in turns, measured by live traffic: callers' batches are run by the one, then by the other.

While a batch is run between live ones, the event loop and the callers' programs wait and leave it the cores. Live
batches alone show what a way of serving costs beside these.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .budget import MeasuringBudget
from .live import Batches, since
from .rounds import MOST_ROUNDS, Steps, Verdict

WINDOW_S = 0.5
_FEWEST_S = 0.1  # of batches in a window; less says nothing
# A window ends after so many batches, or so many times `WINDOW_S`: of a few batches one more would count much.
_MANY, _LONGEST = 10, 3
_BUSY = 0.7  # of a window: callers always wait
# The traffic has changed in a round where the active way's two speeds differ by more than this ratio.
STEADY = 1.5
# A rival that won no round has lost where not even a gain so many times as large would win. One whose gain would win
# divided by it needs two rounds, any other three: by chance a setup that serves 0.9 times as fast seemed 1.12 times as
# fast in two rounds in a row (tests/benchmarks/wrong_choices.py).
CLEAR = 1.25


@dataclass(frozen=True, slots=True)
class Window:
    """The ``rows`` that were run in ``wall_s`` seconds, in so many ``batches``, which took ``busy_s`` seconds."""

    rows: int
    batches: int
    busy_s: float
    wall_s: float

    @property
    def is_enough(self) -> bool:
        return self.busy_s >= _FEWEST_S

    @property
    def rows_per_batch(self) -> float:
        return self.rows / max(self.batches, 1)

    def __add__(self, other: "Window") -> "Window":
        return Window(
            self.rows + other.rows,
            self.batches + other.batches,
            self.busy_s + other.busy_s,
            self.wall_s + other.wall_s,
        )


def live_gain(active: Window, rival: Window) -> float:
    """The ratio of the rival's speed to the active way's: in answered rows, or where callers do not always wait, in
    seconds a row."""
    if min(active.busy_s / active.wall_s, rival.busy_s / rival.wall_s) >= _BUSY:
        return rival.rows / rival.wall_s * active.wall_s / active.rows
    return active.busy_s / active.rows * rival.rows / rival.busy_s


@dataclass(frozen=True, slots=True)
class LiveTrial:
    """Compares two ways of serving by live traffic. ``batches`` gives the batches run so far, ``clock`` seconds."""

    batches: Callable[[], Batches]
    clock: Callable[[], float]
    budget: MeasuringBudget

    def window(self) -> Steps[Window]:
        before, began_s, run = self.batches(), self.clock(), dict[int, tuple[int, int]]()
        for _ in range(_LONGEST):
            yield WINDOW_S
            run = since(before, self.batches())
            if not run or sum(count for count, _ in run.values()) >= _MANY:
                break
        rows = sum(max(size, 1) * count for size, (count, _) in run.items())
        busy_s = sum(spent_ns for _, spent_ns in run.values()) / 1e9
        return Window(rows, sum(count for count, _ in run.values()), busy_s, self.clock() - began_s)

    def verdict(
        self, before: Window, let_serve: Callable[[bool], None], wins: Callable[[float], bool]
    ) -> Steps[Verdict | None]:
        """Let the rival and the active way serve in turns until the rival has won two rounds in a row clearly, or
        three, or has lost two in a row, or one clearly and won none. None where there is too little traffic. The active
        way serves at the end. A round in which the active way's own speed changed tells of the traffic, not of the
        rival: it speaks for nobody.

        ``before``: the active way's window just now. ``let_serve(True)`` lets the rival serve. ``wins``: whether a gain
        speaks for the rival.
        """
        verdict, clear = Verdict(live=True), list[bool]()
        while verdict.rounds < MOST_ROUNDS:
            while wait_s := self.budget.wait_s(WINDOW_S):
                yield wait_s
            let_serve(True)
            try:
                rival = yield from self.window()
            finally:
                let_serve(False)
            after = yield from self.window()
            if not (rival.is_enough and after.is_enough):
                return None
            verdict.rounds, verdict.gain = verdict.rounds + 1, live_gain(before + after, rival)
            verdict.live_rows = rival.rows_per_batch
            self.budget.spend(rival.busy_s * max(1.0 - verdict.gain, 0.0))
            if not 1 / STEADY <= live_gain(before, after) <= STEADY:
                verdict.crowded, before = True, after
                continue
            best = max(live_gain(one, rival) for one in (before, after))
            verdict.outcomes.append(wins(verdict.gain))
            clear.append(wins(verdict.gain / CLEAR))
            verdict.wins = clear[-2:] == [True] * 2 or verdict.outcomes[-3:] == [True] * 3
            is_lost = not (any(verdict.outcomes) or wins(best * CLEAR))
            if verdict.wins or is_lost or verdict.outcomes[-2:] == [False] * 2:
                break
            before = after
        return verdict
