"""The batch size above which more rows bring no more throughput: larger batches only make their callers wait longer.

Caches are limited: an encoder under ONNX Runtime on two cores answers most rows per second at a batch of 8. But each
end of a batch wakes the event loop, which on a busy machine takes a core from the next batch: batches of 4 ms, as fast
by themselves, were a fifth slower under load than batches of 130 ms.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....models.engines.cpu.row_shares import FEWEST_SHARED
from ....models.machine.core_wait import seconds_on_core

BUDGET_S = 0.8  # of one model's measuring at load
_RUNS, _ENOUGH_S = 3, 0.04


@dataclass(frozen=True, slots=True)
class RowsWorth:
    """The rule by which a batch size is as good as the best: ``within`` of its throughput, runs of ``long_enough_s``
    seconds, and no fewer rows than ``least``.

    A longer run is seldom interrupted, and no caller waits long for its end.
    """

    within: float = 0.05
    long_enough_s: float = 0.05
    least: int = 1


ONE_BY_ONE = RowsWorth()
# The end of a batch costs no time where idle cores go on with the next batch, unlike in a measurement of single
# batches; and an admitted request waits for two batches, not for one. Fewer rows are not shared among the cores.
AHEAD = RowsWorth(within=0.2, long_enough_s=0.035, least=FEWEST_SHARED)


def useful_rows(seconds: Mapping[int, float], worth: RowsWorth = ONE_BY_ONE) -> int:
    """The smallest batch size that is as good as the best and runs long enough, or else the largest that is as good.

    ``seconds``: the time of a run, by its rows.
    """
    best = max(rows / taken for rows, taken in seconds.items())
    good = [rows for rows, taken in seconds.items() if rows / taken >= best * (1 - worth.within)]
    return min((rows for rows in good if seconds[rows] >= worth.long_enough_s), default=max(good))


def batch_sizes(most: int, least: int = 1) -> list[int]:
    """Powers of two from ``least`` up to ``most``, and ``most`` itself."""
    return sorted({*(2**power for power in range(most.bit_length()) if least <= 2**power <= most), most})


def measure_useful_rows(
    run_seconds: Callable[[int], float],
    most: int,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
    worth: RowsWorth = ONE_BY_ONE,
) -> int:
    """`useful_rows` of batches up to ``most``, measured smallest first and, while there is time, again.

    ``run_seconds`` times a batch. 0, not known, where the budget ends while throughput still rises.
    """
    began = before = clock()
    seconds: dict[int, float] = {}
    for rows in batch_sizes(most, worth.least):
        spent, before = clock() - before, clock()
        if seconds and before - began + 2 * spent > budget_s:  # twice the rows: about twice as long
            found = useful_rows(seconds, worth)
            return 0 if found == max(seconds) else found
        seconds[rows] = run_seconds(rows)
    while 2 * (clock() - began) < budget_s:  # there is time to measure again: a disturbance may be over
        looks = {rows: run_seconds(rows) for rows in seconds}
        seconds = {rows: min(taken, looks[rows]) for rows, taken in seconds.items()}
    return useful_rows(seconds, worth)


def shortest_seconds(run: Callable[[], object]) -> float:
    """The shortest of up to three runs, after one that is not counted: other programs can only make a run longer."""
    run()
    times: list[float] = []
    while not times or (len(times) < _RUNS and sum(times) < _ENOUGH_S):
        times.append(seconds_on_core(run))
    return min(times)
