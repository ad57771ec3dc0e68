"""Warnings that a caller can cause as often as it likes: the log has some of them, and how many more there were."""

import logging


class RepeatedWarning:
    """One sentence. Logged are the 1st, the 10th, the 100th and from there on each 1000th: by count, not by time."""

    def __init__(self, logger: logging.Logger, sentence: str) -> None:
        self._logger, self._sentence = logger, sentence
        self._seen = self._logged = 0

    def count(self, detail: str) -> None:
        """One more. ``detail`` says what it was this time."""
        self._seen += 1
        if self._seen not in (1, 10, 100) and self._seen % 1000:
            return
        more = self._seen - self._logged - 1
        self._logged = self._seen
        since = f" ({more} more since the last line like this, {self._seen} in all)" if more else ""
        self._logger.warning("%s: %s%s", self._sentence, detail, since)
