"""The useful number of rows in a batch, measured again by the rule of `loading/useful_rows.py`, and by live traffic."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ....models.engines.engine import Engine
from ..loading.cpu_choice import TimedSetup
from ..loading.useful_rows import AHEAD, ONE_BY_ONE, RowsWorth, batch_sizes, useful_rows
from .live_trial import LiveTrial
from .rounds import MOST_ROUNDS, SHORT_S, BatchToTime, Side, Steps, Stopwatch, Verdict
from .what_serves import WhatServes

_LONGEST_S = 0.2  # of one that is twice as large as live batches, where they bring more the larger they are
ROWS_MUST_GAIN = 1.05  # times as many rows per second
_LONG_WAITS = 4  # times as many rows as are useful: callers wait for nothing
_RUNS = 2  # of each size in a round


def right_rows(now: WhatServes, watch: Stopwatch, trial: LiveTrial) -> Steps[bool]:
    """Measure batches of one row, two, four, … and take another size where it is better: by live traffic where there is
    enough of it, else where two rounds in a row agree; one that was disturbed changes nothing. True if another size was
    taken."""
    limit, most = now.limit, now.loaded.spec.max_batch_size
    if limit == 0 or most == 1:
        return False
    worth = worth_of(now.engine)
    before = yield from trial.window()
    watch.anew()
    seconds = yield from _ladder(now.engine, now.taken, limit, most, worth, watch)
    if before.is_enough:
        rows = _within_memory(better_rows(seconds, limit, worth), now)
        if rows == limit:
            return False
        needed = rows_must_gain(limit, rows, worth)
        lend = partial(now.lend, replace(now.prepared, useful_rows=rows))
        verdict = yield from trial.verdict(before, lend, lambda gain: gain >= needed)
        # More rows than a few callers send tell nothing: their batches are as large as before.
        if verdict is not None and (rows < limit or verdict.live_rows > limit):
            return verdict.wins and _take(rows, verdict, now)
    wanted = [limit if watch.was_disturbed() else better_rows(seconds, limit, worth)]
    while len(wanted) < MOST_ROUNDS:
        watch.anew()
        seconds = yield from _ladder(now.engine, now.taken, limit, most, worth, watch)
        wanted.append(limit if watch.was_disturbed() else better_rows(seconds, limit, worth))
        if _side(wanted[-1], limit) == _side(wanted[-2], limit):
            rows = _within_memory(wanted[-1], now)
            return rows != limit and _take(rows, Verdict(True, len(wanted), _gain(seconds, limit, rows)), now)
    return False


def _within_memory(rows: int, now: WhatServes) -> int:
    ceiling = now.prepared.ceiling.smallest if now.prepared.ceiling is not None else 0
    return min(rows, ceiling or rows)


def _take(rows: int, verdict: Verdict, now: WhatServes) -> bool:
    change = f"batches of up to {now.limit}", f"batches of up to {rows}"
    return now.exchange(replace(now.prepared, useful_rows=rows), "useful rows", change, verdict)


def _gain(seconds: Mapping[int, float], limit: int, rows: int) -> float:
    known = rows in seconds and limit in seconds
    return rows / seconds[rows] * seconds[limit] / limit if known else 0.0


def worth_of(engine: Engine) -> RowsWorth:
    return AHEAD if engine.in_flight > 1 else ONE_BY_ONE


def useful_rows_of(rival: Side, now: WhatServes, watch: Stopwatch) -> Steps[int]:
    """The useful rows of an engine that does not serve, by one round."""
    most, worth = now.loaded.spec.max_batch_size, worth_of(rival.engine)
    seconds = yield from _ladder(rival.engine, rival.taken, most, most, worth, watch)
    return _within_memory(useful_rows(seconds, worth), now)


def better_rows(seconds: Mapping[int, float], limit: int, worth: RowsWorth) -> int:
    """The useful rows by the seconds of a batch, or ``limit`` where that is as good."""
    found = useful_rows(
        {rows: taken for rows, taken in seconds.items() if rows >= min(worth.least, max(seconds))}, worth
    )
    nearest = max((rows for rows in seconds if rows <= limit), default=min(seconds))
    gain = found / seconds[found] / (nearest / seconds[nearest])
    return found if gain >= rows_must_gain(limit, found, worth) else limit


def rows_must_gain(limit: int, rows: int, worth: RowsWorth) -> float:
    """The ratio of the rows per second in batches of ``rows`` to those in batches of ``limit`` that a change needs: no
    more than 1 where callers wait far less for the new ones."""
    return 1.0 - worth.within if rows * _LONG_WAITS <= limit else ROWS_MUST_GAIN


def _ladder(
    engine: Engine, taken: TimedSetup, limit: int, most: int, worth: RowsWorth, watch: Stopwatch
) -> Steps[dict[int, float]]:
    """Seconds of batches of one row, two, four, …, as far as larger ones are worth their time."""
    found = TimedSetup(taken.setup, {})
    for rows in sorted({1, *batch_sizes(most, worth.least)}):
        if found.seconds and not _goes_on(found.seconds, rows, limit, worth):
            break
        yield from watch.time(*[BatchToTime(engine, rows, found)] * _RUNS)
        for seconds in found.runs[rows]:
            taken.add(rows, seconds)
    return found.seconds


def _goes_on(seconds: Mapping[int, float], rows: int, limit: int, worth: RowsWorth) -> bool:
    """True if a batch of ``rows``, more than were measured, is worth its time, which callers wait for."""
    last, *before = sorted(seconds, reverse=True)
    about_s = seconds[last] * rows / last
    if seconds[last] < worth.long_enough_s:
        return about_s <= 2 * SHORT_S or last == 1
    still_rises = not before or last / seconds[last] > ROWS_MUST_GAIN * before[0] / seconds[before[0]]
    return still_rises and rows <= 2 * limit and about_s <= _LONGEST_S


def _side(rows: int, limit: int) -> int:
    return (rows > limit) - (rows < limit)
