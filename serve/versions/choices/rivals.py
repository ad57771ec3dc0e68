"""The rivals of the way that serves, and the gain that each needs: the rules of the first load, in both directions.

A load begins with the plain program on one core and adds what gains enough. Here the way that serves may have too much
as well: what a load would not add is removed again, once its gain is clearly below the one it needs (`HYSTERESIS`).
"""

from collections.abc import Collection, Sequence

from ....models.engines.cpu.setup import SHARED_ROWS, CpuSetup
from ....models.engines.engine import HALF_MUST_GAIN
from ..loading.cpu_choice import MAY_LOSE, MORE_THREADS_MUST_GAIN, MUST_GAIN, mean
from ..loading.tuned import Way

HYSTERESIS = 1.05
FEWER_MUST_GAIN = 2.0  # of fewer threads, where other programs use the cores
CROWDED_MUST_GAIN = 1.25  # times what another form needs, where other programs use the cores
THREADS = "threads"
CHANGES = (THREADS, *MUST_GAIN)  # of a setup, in the order of a load


def everything(cores: int, short: bool, long_rows: bool) -> CpuSetup:
    """All cores and all passes that may gain, of which an engine takes those that it allows; ``short`` and
    ``long_rows`` as in `setup_rivals`. The best setup is most often this one, or one change away from it."""
    return CpuSetup(1 if short else cores, frozenset(MUST_GAIN) - (set() if long_rows else {SHARED_ROWS}))


def setup_rivals(
    setup: CpuSetup, change: str, possible: Collection[str], cores: int, short: bool, long_rows: bool
) -> list[CpuSetup]:
    """The setups that differ from ``setup`` by one change of `CHANGES`.

    ``possible``: the passes that the engine allows. ``short``: its largest batch ends before a second thread has begun.
    ``long_rows``: a row lasts long enough to be shared.
    """
    if change == THREADS:
        counts = {1} if short else {1, cores}
        return [CpuSetup(threads, setup.passes) for threads in sorted(counts - {setup.threads}, reverse=True)]
    if change in setup.passes:
        return [setup.without(change)]
    if change in possible and (change != SHARED_ROWS or long_rows):
        return [setup.having(change)]
    return []


def gain_needed(active: Way, rival: Way) -> float:
    """The ratio of the rival's speed to the active way's at which the ``rival`` takes the place of ``active``.

    What a load would add needs the same gain as at a load. The way back needs more than the loss of that gain, so that
    a way that is just good enough is not put in and taken out again.
    """
    ratio = _merit(rival, active) / _merit(active, rival)
    return ratio if _adds(active, rival) else ratio * HYSTERESIS


def _merit(way: Way, other: Way) -> float:
    """The gain that the way needs for its half, or of two ways of one form for its threads and passes."""
    if (way.form, way.precision) != (other.form, other.precision):
        return 1.0 if way.precision == "fp32" or other.precision != "fp32" else HALF_MUST_GAIN
    merit = MORE_THREADS_MUST_GAIN if way.threads > other.threads else 1.0
    for name in way.setup.passes - other.setup.passes:
        merit *= MUST_GAIN.get(name, 1.0)
    return merit


def _adds(active: Way, rival: Way) -> bool:
    if (active.form, active.precision) != (rival.form, rival.precision):
        return active.precision == "fp32" != rival.precision
    return rival.threads > active.threads or rival.setup.passes > active.setup.passes


def wins(active: Way, rival: Way, gains: Sequence[float], crowded: bool, live: bool = True) -> bool:
    """True if one round of measurements, a gain for each size of batch, speaks for the rival.

    Where other programs use the cores, more threads measure worse than they are, and forms suffer differently: fewer
    threads and other forms take the place only where they are far better, by ``live`` traffic. Without it callers lose
    nothing until the other programs have ended.
    """
    one_form = (active.form, active.precision) == (rival.form, rival.precision)
    if crowded and not live and (not one_form or rival.threads < active.threads):
        return False
    if crowded and rival.threads < active.threads and mean(list(gains)) < FEWER_MUST_GAIN:
        return False
    if one_form and rival.threads == active.threads and min(gains) < MAY_LOSE:
        return False
    return mean(list(gains)) >= gain_needed(active, rival) * (
        CROWDED_MUST_GAIN if crowded and not one_form else 1.0
    )
