"""The share of the time in which batches ran, for autoscalers: computed when it is read, nothing is paid per batch."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_NS = 10_000_000_000
_STEP_NS = 1_000_000_000  # between two looks; a read in between gives the last value


class Utilisation:
    """``busy_ns`` gives the time that batches took so far; ``clock`` gives nanoseconds. For one thread.

    A version that is unloaded takes its time out of the sum: the share of that moment is too low, never below 0.
    Several batches that compute at once count each, up to 1.
    """

    def __init__(self, busy_ns: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._busy_ns, self._clock = busy_ns, clock
        self._looks = deque([(clock(), busy_ns())])  # (when, how long batches had run)
        self._share = 0.0

    def share(self) -> float:
        """From 0 to 1, over the last `WINDOW_NS`; over the time since the last read where that is longer."""
        now_ns = self._clock()
        if now_ns - self._looks[-1][0] < _STEP_NS:
            return self._share
        self._looks.append((now_ns, self._busy_ns()))
        while len(self._looks) > 2 and now_ns - self._looks[1][0] >= WINDOW_NS:
            self._looks.popleft()
        (since_ns, before_ns), (_, busy_ns) = self._looks[0], self._looks[-1]
        self._share = min(max((busy_ns - before_ns) / (now_ns - since_ns), 0.0), 1.0)
        return self._share
