"""How many rows of a batch are useful, measured again between live batches by the load's rule (`useful_rows.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from ....models.engines.engine import Engine
from ..loading.cpu_choice import Timed
from ..loading.useful_rows import Worth, batch_sizes, useful_rows
from .rounds import MOST_ROUNDS, SHORT_S, Job, Steps, Stopwatch

_LONGEST_S = 0.2  # of one that is twice as large as live batches, where they bring more the larger they are
ROWS_MUST_GAIN = 1.05  # in rows per second
_LONG_WAITS = 4  # times as many rows as are useful: callers wait for nothing
_RUNS = 2  # of each size in a round


@dataclass(frozen=True, slots=True)
class AgreedRows:
    """The useful rows, the seconds of a batch by rows in the last round, and how many rounds it took."""

    rows: int
    seconds: Mapping[int, float]
    rounds: int


def agreed_rows(
    engine: Engine, taken: Timed, limit: int, most: int, worth: Worth, watch: Stopwatch
) -> Steps[AgreedRows | None]:
    """Measure batches of one row, two, four, … until two rounds in a row agree; None where they do not.

    ``limit`` rows are in a batch now, and stay where they are as good; at most ``most``. ``taken`` gets every run.
    """
    wanted: list[int] = []
    for _ in range(MOST_ROUNDS):
        seconds = yield from _ladder(engine, taken, limit, most, worth, watch)
        wanted.append(better_rows(seconds, limit, worth))
        if len(wanted) > 1 and _side(wanted[-1], limit) == _side(wanted[-2], limit):
            return AgreedRows(wanted[-1], seconds, len(wanted))
    return None


def better_rows(seconds: Mapping[int, float], limit: int, worth: Worth) -> int:
    """The useful rows by the seconds of a batch, or ``limit`` where that is as good."""
    found = useful_rows(
        {rows: taken for rows, taken in seconds.items() if rows >= min(worth.least, max(seconds))}, worth
    )
    nearest = max((rows for rows in seconds if rows <= limit), default=min(seconds))
    gains = found / seconds[found] >= ROWS_MUST_GAIN * nearest / seconds[nearest]
    return found if gains or found * _LONG_WAITS <= limit else limit


def _ladder(
    engine: Engine, taken: Timed, limit: int, most: int, worth: Worth, watch: Stopwatch
) -> Steps[dict[int, float]]:
    found = Timed(taken.setup, {})
    for rows in sorted({1, *batch_sizes(most, worth.least)}):
        if found.seconds and not _goes_on(found.seconds, rows, limit, worth):
            break
        yield from watch.time(*[Job(engine, rows, found)] * _RUNS)
        for seconds in found.runs[rows]:
            taken.add(rows, seconds)
    return found.seconds


def _goes_on(seconds: Mapping[int, float], rows: int, limit: int, worth: Worth) -> bool:
    """Whether a batch of ``rows``, more than were measured, is worth its time, which callers wait for."""
    last, *before = sorted(seconds, reverse=True)
    about_s = seconds[last] * rows / last
    if seconds[last] < worth.long_enough_s:
        return about_s <= 2 * SHORT_S or last == 1
    still_rises = not before or last / seconds[last] > ROWS_MUST_GAIN * before[0] / seconds[before[0]]
    return still_rises and rows <= 2 * limit and about_s <= _LONGEST_S


def _side(rows: int, limit: int) -> int:
    return (rows > limit) - (rows < limit)
