"""The pace at which the server reads the store: twice a second. A store of a thousand models is read as often as 2 % of
a core allow, but every 1.5 s at least: what `convert` publishes is noticed within two seconds."""

import time
from collections.abc import Callable

LOOK_EVERY_S, LONGEST_PAUSE_S = 0.5, 1.5
SHARE = 0.02  # of a core


class LookingPace:
    """``clock`` gives processor seconds of the thread that looks."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._before_s = clock, 0.0

    def pause_after(self, look: Callable[[], object]) -> float:
        """Look, and give the seconds to wait until the next look. One look that made a version ready does not count."""
        began_s = self._clock()
        look()
        spent_s = self._clock() - began_s
        steady_s, self._before_s = min(spent_s, self._before_s), spent_s
        return min(max(LOOK_EVERY_S, steady_s / SHARE), LONGEST_PAUSE_S)
