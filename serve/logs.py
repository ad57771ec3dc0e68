"""The server's log: sentences for people, or one JSON object a line for machines.

A record's ``extra`` values (model, version, request_id, …) are fields of their own in JSON and follow the sentence in
text, so that a failed request is found by its id in both.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}

# One record per answered or refused infer request; silent unless --access-log.
requests = logging.getLogger("halfeven.requests")


def set_up(level: str = "warning", form: Literal["text", "json"] = "text", access: bool = False) -> None:
    """Log to stderr from ``level`` on; ``access``: log every request, whatever the level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Sentences())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    requests.setLevel(logging.INFO if access else logging.CRITICAL)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of the record that not every record has, but for those that a library adds (Ray's begin with _)."""
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _OF_EVERY_RECORD and not key.startswith("_")
    }


class JsonLines(logging.Formatter):
    """``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, the record's own fields, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Sentences(logging.Formatter):
    """``WARNING halfeven.batcher: a sentence (model=digits request_id=7)``.

    One line each, whatever characters a caller sent; the lines of a traceback follow, indented.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        sentence = _in_one_line(super().formatMessage(record))
        fields = " ".join(f"{key}={value!r}" for key, value in fields_of(record).items())
        return f"{sentence} ({fields})" if fields else sentence

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_in_one_line(line)}" for line in super().formatException(ei).split("\n"))


def _in_one_line(text: str) -> str:
    """The text with invisible characters (line ends, escape sequences, …) as Python writes them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
