"""After a brief answer to a lone caller the event loop looks again for a moment before it sleeps.

To put a core to sleep and to be woken takes as long as such a batch, and what runs next finds its caches cold. Measured
on two cores with one caller who asks again at once: medians of 0.19 to 0.25 ms instead of 0.26 to 0.30. Linux does the
same for idle processors (haltpoll) and network devices (busy polling). Who does not come back at once is soon not
looked for: a moment that was in vain doubles the number of answers that are followed by none.
"""

import asyncio
from collections.abc import Callable

LOOK_NS = 100_000  # its writing is in it
_AT_ONCE_NS = 250_000  # its writing and being woken are in it
_RAREST = 64  # answers


class BriefPolling:
    """One batcher's. ``clock`` gives nanoseconds; ``idle`` says whether nobody else has a use for the core now."""

    def __init__(self, clock: Callable[[], int], idle: Callable[[], bool]) -> None:
        self._clock = clock
        self._idle = idle
        self._answered_ns: int | None = None  # when the last lone answer was given
        self._until_ns = 0
        self._looking = False
        self._skip = self._skipped = 0

    def asked(self, now_ns: int) -> None:
        """A lone caller is here."""
        if self._answered_ns is None:
            return
        if now_ns - self._answered_ns <= _AT_ONCE_NS:
            self._skip = 0
        else:
            self._skip = min(2 * self._skip + 1, _RAREST)
        self._answered_ns = None

    def answered(self, loop: asyncio.AbstractEventLoop) -> None:
        """He has his answer: look again for a moment, unless that was in vain of late."""
        self._answered_ns = now_ns = self._clock()
        if self._skipped < self._skip:
            self._skipped += 1
            return
        self._skipped = 0
        self._until_ns = now_ns + LOOK_NS
        if not self._looking:
            self._looking = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """A callback that is ready keeps the loop from sleeping; what came meanwhile runs in between."""
        self._looking = self._clock() < self._until_ns and self._idle()
        if self._looking:
            loop.call_soon(self._look, loop)
