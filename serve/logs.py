"""The server's log: sentences for people, or one JSON object a line for machines.

A record's ``extra`` values (model, version, request_id, …) are fields of their own in JSON and follow the sentence in
text, so that a failed request is found by its id in both.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}

# One record per answered or refused infer request; silent unless --access-log.
requests = logging.getLogger("halfeven.requests")


_LOG = logging.getLogger("halfeven")
_real_stderr: TextIO | None = None  # where `make_all_stderr_json` has put another file in its place
_LAST_WORDS_S = 2.0  # for the lines of others that are still on their way at the end


def set_up(level: str = "warning", form: Literal["text", "json"] = "text", access: bool = False) -> None:
    """Log to stderr from ``level`` on; ``access``: log every request, whatever the level."""
    handler = logging.StreamHandler(_real_stderr or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Sentences())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    requests.setLevel(logging.INFO if access else logging.CRITICAL)
    # A change of the version that answers is news at the default level too.
    logging.getLogger("halfeven.versions").setLevel(logging.INFO if level == "warning" else logging.NOTSET)


def announce(sentence: str) -> None:
    """Log the sentence whatever the level is: who starts a server waits for it."""
    place = (_LOG.name, logging.INFO, __file__, 0, sentence, (), None)
    _LOG.callHandlers(_LOG.makeRecord(*place))


def make_all_stderr_json() -> None:
    """From now on what else writes to stderr, children and libraries in C++ too, writes to a process that makes each of
    its lines a JSON object; warnings and unforeseen errors are logged. To be called once, before `set_up`."""
    global _real_stderr
    _real_stderr = real = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    script = Path(__file__).with_name("foreign_lines.py")
    reader = subprocess.Popen(
        [sys.executable, "-IS", str(script)], stdin=subprocess.PIPE, stdout=real, start_new_session=True
    )
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    logging.captureWarnings(True)
    sys.excepthook = _log_unforeseen
    threading.excepthook = lambda one: _log_unforeseen(one.exc_type, one.exc_value, one.exc_traceback)
    atexit.register(_end, reader, real, os.getpid())


def _end(reader: "subprocess.Popen[bytes]", real: TextIO, process: int) -> None:
    """Wait until the last lines are out: a container ends with its first process."""
    if os.getpid() == process:  # not in a fork
        sys.stderr.flush()
        os.dup2(real.fileno(), 2)
        with suppress(subprocess.TimeoutExpired):
            reader.wait(_LAST_WORDS_S)


def _log_unforeseen(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        _LOG.critical("%s", error, exc_info=(kind, error or kind(), traceback))


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
