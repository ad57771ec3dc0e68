"""Paired tests of two versions on the same rows: is the new one no worse than a margin allows, and is it better?

Both answers are one-sided, at a confidence of 95 %. Where a row is right or wrong, "better" is the exact McNemar test,
and the limit of the loss is that of Tango's score interval for paired shares (Statistics in Medicine 17, 1998, 891 to
908). For any other metric both come from the paired bootstrap over rows (Efron and Tibshirani, 1993, percentiles).

A margin alone would refuse every version on few rows, whose noise is larger than it. So the limit may reach what a
loss of exactly the margin, on so many rows, could be confused with (Wilson's limit): 5.9 points on 100 rows and 3.3 on
500, for a margin of 2 points. On even fewer rows, where the margin is less than `FEW` rows, the loss itself decides,
and `PARDONED` rows never refuse.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ....models.files.json_fields import JsonFields

CONFIDENCE = 0.95
_Z = 1.6448536269514722  # the normal quantile of the confidence
FEW = 6  # rows within the margin, below which it is not tested
PARDONED = 2  # rows
DRAWS, LEAST_DRAWS = 1000, 200
MOST_WORK = 1 << 33  # numbers that all draws together add up; where it would be more there are fewer draws
_AT_ONCE = 1 << 22  # weights in memory


@dataclass(frozen=True, slots=True)
class Comparison(JsonFields):
    """The loss from an old version to a new one (negative: a gain): a share, or the relative growth of an error.

    ``at_most``: the loss is not larger, at the confidence. ``allowed``: how large ``at_most`` may be. ``lost_rows`` and
    ``gained_rows``: right before and wrong now, and the reverse, or without a finite value before; None where a row is
    not right or wrong. ``draws``: how often the rows were drawn again, where the limits are the bootstrap's. ``holds``:
    no worse than the margin allows; ``better``: better, at the confidence.
    """

    rows: int
    loss: float
    at_most: float
    allowed: float
    holds: bool
    better: bool
    lost_rows: int | None = None
    gained_rows: int | None = None
    draws: int | None = None


def compare_right(old: np.ndarray, new: np.ndarray, margin: float, tests: int = 1) -> Comparison:
    """``old``, ``new``: ``bool [rows]``, whether each row is right. ``margin``: a share of rows. ``tests``: how many
    times "better" is asked of one version; the confidence is divided among them (Bonferroni)."""
    rows = len(old)
    lost, gained = int((old & ~new).sum()), int((new & ~old).sum())
    loss, at_most = (lost - gained) / rows, loss_limit(lost, gained, rows)
    better = mcnemar(gained, lost) < (1 - CONFIDENCE) / tests
    holds = _holds(loss, at_most, margin, rows, PARDONED / rows)
    return Comparison(rows, loss, at_most, limit_of_share(margin, rows), holds, better, lost, gained)


def compare_resampled(
    losses_of: Callable[[np.ndarray], np.ndarray], rows: int, margin: float, shares: bool, tests: int = 1,
    work: int = 1, size: int = 1,
) -> Comparison:  # fmt: skip
    """``losses_of(int32 [rows, draws])``: the losses of some draws, of which each has a row so many times. ``shares``:
    the loss is one of points (accuracy, F1, AUROC), where `PARDONED` rows have a meaning. ``work``: how many numbers
    one draw adds up; ``size``: how many of them are in memory at once. The draws are the same each time.
    """
    random = np.random.default_rng(0)
    loss = float(losses_of(np.ones((rows, 1), np.int32))[0])
    draws = max(LEAST_DRAWS, min(DRAWS, MOST_WORK // work))
    at_once = max(1, _AT_ONCE // max(rows, size))
    blocks = (min(at_once, draws - done) for done in range(0, draws, at_once))
    drawn = np.concatenate([losses_of(_drawn(random, rows, block)) for block in blocks])
    drawn = drawn[~np.isnan(drawn)]  # AUROC of rows that all have one class is none
    known = np.isfinite(loss) and drawn.size > 0
    at_most = float(np.quantile(drawn, CONFIDENCE)) if known else math.inf
    sure = float(np.quantile(drawn, 1 - (1 - CONFIDENCE) / tests)) if known else math.inf
    holds = known and _holds(loss, at_most, margin, rows, PARDONED / rows if shares else 0.0)
    limit = limit_of_share(margin, rows)
    return Comparison(rows, loss, at_most, limit, holds, sure < 0, draws=draws)


def with_cured(rest: Comparison, cured: int, tests: int) -> Comparison:
    """The comparison of the rows that both versions have a value for, beside ``cured`` rows that had none before."""
    better = rest.better or mcnemar(cured, 0) < (1 - CONFIDENCE) / tests
    return replace(rest, better=better, lost_rows=0, gained_rows=cured)


def cured_alone(cured: int, margin: float, tests: int) -> Comparison:
    """The comparison where no row had a value before: each error fell by all of itself."""
    rest = Comparison(cured, -1.0, -1.0, limit_of_share(margin, cured), holds=True, better=False)
    return with_cured(rest, cured, tests)


def _drawn(random: np.random.Generator, rows: int, draws: int) -> np.ndarray:
    """``int32 [rows, draws]``: how often each row is among as many rows, drawn with replacement."""
    found = [np.bincount(random.integers(0, rows, rows), minlength=rows) for _ in range(draws)]
    return np.stack(found, 1).astype(np.int32)


def mcnemar(gained: int, lost: int) -> float:
    """The chance of at least ``gained`` among the rows that differ, if losing were as likely as gaining (exact)."""
    differ = gained + lost
    if not differ:
        return 1.0
    top = math.lgamma(differ + 1) - differ * math.log(2)
    logs = [top - math.lgamma(k + 1) - math.lgamma(differ - k + 1) for k in range(gained, differ + 1)]
    return min(1.0, math.fsum(math.exp(log) for log in logs))


def loss_limit(lost: int, gained: int, rows: int) -> float:
    """The upper limit of Tango's score interval for the share lost minus the share gained."""

    def excluded(loss: float) -> bool:
        linear = (2 * rows - lost + gained) * loss - lost - gained
        root = math.sqrt(linear**2 + 8 * rows * gained * loss * (1 - loss))
        variance = rows * (2 * (root - linear) / (4 * rows) + loss * (1 - loss))
        return rows * loss - (lost - gained) > _Z * math.sqrt(max(variance, 0.0))

    low, high = (lost - gained) / rows, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if excluded(middle) else (middle, high)
    return high


def limit_of_share(share: float, rows: int) -> float:
    """Wilson's upper limit of a share that was found on so many rows."""
    centre = share + _Z**2 / (2 * rows)
    spread = _Z * math.sqrt(share * (1 - share) / rows + _Z**2 / (4 * rows**2))
    return (centre + spread) / (1 + _Z**2 / rows)


def _holds(loss: float, at_most: float, margin: float, rows: int, pardoned: float) -> bool:
    few = margin * rows < FEW and loss <= max(margin, pardoned) + 1e-9
    return few or at_most <= limit_of_share(margin, rows) + 1e-9
