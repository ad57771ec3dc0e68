"""Measuring again while requests are served has a budget.

The rule: processor seconds spent so far <= 2 % of the seconds since the start + `ALLOWANCE_S`. The allowance is for the
first minute, in which a wrong choice is found and replaced; it is what the rule gives in twelve minutes.
"""

import time
from collections.abc import Callable

SHARE = 0.02  # of one busy core
ALLOWANCE_S = 15.0


class MeasuringBudget:
    """``clock`` gives seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        share: float = SHARE,
        allowance_s: float = ALLOWANCE_S,
    ) -> None:
        self._clock, self._share, self._allowance_s = clock, share, allowance_s
        self._began_s = clock()
        self.spent_s = 0.0

    def spend(self, core_s: float) -> None:
        self.spent_s += core_s

    def wait_s(self, next_s: float = 0.0) -> float:
        """Seconds until ``next_s`` processor seconds more may be spent; 0: now. More than the whole allowance may be
        spent at once where that much was saved up."""
        short_s = self.spent_s + min(next_s, self._allowance_s) - self._allowance_s
        return max(short_s / self._share - (self._clock() - self._began_s), 0.0)
