"""Warnings that a caller can cause as often as it likes: some are logged, with the number of them so far."""

import logging
import time
from collections.abc import Callable


class RepeatedWarning:
    """A kind of warning. The 1st, 10th and 100th are logged, then each 1000th: by count, not by time."""

    def __init__(self, logger: logging.Logger, warning: str) -> None:
        self._logger, self._warning = logger, warning
        self._seen = self._logged = 0

    def count(self, detail: str) -> None:
        """Count one warning; ``detail`` is its text."""
        self._seen += 1
        if self._seen not in (1, 10, 100) and self._seen % 1000:
            return
        more = self._seen - self._logged - 1
        self._logged = self._seen
        since = f" ({more} more since the last line like this, {self._seen} in all)" if more else ""
        self._logger.warning("%s: %s%s", self._warning, detail, since)


class WarningEachSecond:
    """A kind of warning of which at most one a second is logged, with the number of those since the last line."""

    def __init__(
        self, logger: logging.Logger, warning: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._warning, self._clock = logger, warning, clock
        self._last_s, self._since = float("-inf"), 0

    def count(self, detail: str) -> None:
        """Count one warning; ``detail`` is its text."""
        self._since += 1
        now_s = self._clock()
        if now_s - self._last_s < 1.0:
            return
        times = f" ({self._since} since the last line like this)" if self._since > 1 else ""
        self._last_s, self._since = now_s, 0
        self._logger.warning("%s: %s%s", self._warning, detail, times)
