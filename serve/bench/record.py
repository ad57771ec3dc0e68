"""The record of one stage of load, written as cheaply as possible while it runs; `figures.py` reads it."""

from array import array
from dataclasses import dataclass, field

OK = 200
MOST_TIMINGS = 65_536
_LONGEST = 500  # characters of the first message of each status


@dataclass(slots=True, eq=False)
class Record:
    """Requests count by when they were due: from ``begin`` until before ``end`` (seconds of the loop's clock).

    ``latencies`` and ``due`` by status, in seconds from the scheduled arrival; ``refusals`` are those of every
    status but 200 from when they were sent. ``in_window`` is how many good answers came between begin and end,
    ``late`` by how much the generator itself missed arrivals. ``timings`` are Server-Timing headers as they
    came, of every answer or, where there are very many, of every second, fourth, …
    """

    begin: float
    end: float
    sent: int = 0
    in_window: int = 0
    latencies: "dict[int, array[float]]" = field(default_factory=dict)
    due: "dict[int, array[float]]" = field(default_factory=dict)
    refusals: dict[int, "array[float]"] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    retry_after: dict[str, int] = field(default_factory=dict)
    answered_by: dict[tuple[str, str], int] = field(default_factory=dict)
    late: "array[float]" = field(default_factory=lambda: array("d"))
    timings: list[bytes] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def was_sent(self, scheduled: float) -> None:
        """Count one request that was due, answered or not."""
        if self.begin <= scheduled < self.end:
            self.sent += 1

    def was_late(self, scheduled: float, now: float) -> None:
        """Note by how much the generator itself missed an arrival."""
        if self.begin <= scheduled < self.end:
            self.late.append(now - scheduled)

    def answered(
        self, scheduled: float, sent: float, now: float, status: int, head: bytes, body: bytes
    ) -> None:
        if status == OK and self.begin <= now < self.end:
            self.in_window += 1
        if not self.begin <= scheduled < self.end:
            return
        if status not in self.latencies:
            self.latencies[status], self.due[status] = array("d"), array("d")
        self.latencies[status].append(now - scheduled)
        self.due[status].append(scheduled)
        if status == OK:
            self._read(head)
        else:
            self.refusals.setdefault(status, array("d")).append(now - sent)
            self._refused(status, head, body)

    def failed(self, scheduled: float, reason: str, message: str = "") -> None:
        """No answer at all: ``timeout``, ``connection lost`` or ``cannot connect``."""
        if self.begin <= scheduled < self.end:
            self.failures[reason] = self.failures.get(reason, 0) + 1
            if message:
                self.messages.setdefault(reason, message)

    def _read(self, head: bytes) -> None:
        key = value_of(head, b"halfeven-version"), value_of(head, b"halfeven-precision")
        self.answered_by[key] = self.answered_by.get(key, 0) + 1
        self._seen += 1
        if self._seen % self._stride == 0 and (at := head.find(b"\r\nserver-timing:")) >= 0:
            self.timings.append(head[at + 16 : _line_end(head, at + 2)])
            if len(self.timings) >= MOST_TIMINGS:
                self.timings = self.timings[1::2]
                self._stride *= 2

    def _refused(self, status: int, head: bytes, body: bytes) -> None:
        self.messages.setdefault(str(status), body[:_LONGEST].decode(errors="replace"))
        if after := value_of(head, b"retry-after"):
            self.retry_after[after] = self.retry_after.get(after, 0) + 1


def value_of(head: bytes, name: bytes) -> str:
    """A header's value, empty where there is none. ``head`` and ``name`` in lower case."""
    at = head.find(b"\r\n%b:" % name)
    return "" if at < 0 else head[at + len(name) + 3 : _line_end(head, at + 2)].strip().decode("latin-1")


def _line_end(head: bytes, start: int) -> int:
    end = head.find(b"\r", start)
    return end if end >= 0 else len(head)
