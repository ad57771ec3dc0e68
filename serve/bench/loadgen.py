"""The two kinds of load. Both drive plain callbacks: an answer comes in, the next request goes out.

*Closed loop*: a number of callers, each of which asks again when it has its answer. It measures what the server can do
at that concurrency; but a server that stalls is asked less, and its stall is measured once per caller.
*Open loop*: requests arrive at random times (Poisson), whatever the server does, and latency counts from when a request
was due, not from when it could be sent, so that a stall delays every request due in it (no coordinated omission).
"""

import asyncio
import ctypes
import os
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...models.errors import BadSetting
from .connection import Connection
from .record import Record

SWEEP_S = 0.1
RETRY_S = 0.05  # between attempts to connect
_MONOTONIC, _NONBLOCK = 1, os.O_NONBLOCK | os.O_CLOEXEC
_SOONEST_NS = 1_000  # zero would disarm it


@dataclass(frozen=True, slots=True)
class Target:
    """The server to load, and what is sent there: ``requests`` are complete HTTP requests, taken in turn."""

    host: str
    port: int
    requests: Sequence[bytes]
    tls: ssl.SSLContext | None = None


class Load:
    """Common to both kinds: connections that are kept at work, time-outs, the record."""

    def __init__(
        self, target: Target, record: Record, timeout_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._target = target
        self._record = record
        self._timeout_s = timeout_s
        self._clock = clock
        self._connections: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._fault: BaseException | None = None

    async def run(self) -> None:
        """Load until the record's window ends, then wait for the requests under way, at most their time-out."""
        try:
            self._start()
            while not self._done(self._clock()):
                await asyncio.sleep(SWEEP_S)
                self._sweep(self._clock())
                if self._fault is not None:
                    raise self._fault
        finally:
            self._stop()

    def answered(self, connection: Connection, status: int, head: bytes, body: bytes) -> None:
        now = self._clock()
        self._record.answered(connection.scheduled, connection.sent, now, status, head, body)
        if connection.finished:
            self._connections.discard(connection)
            self._replace()
        else:
            self._free(connection, now)

    def lost(self, connection: Connection) -> None:
        if connection.busy:
            self._record.failed(connection.scheduled, "connection lost")
        self._drop(connection)
        self._replace()

    def _send(self, connection: Connection, scheduled: float, now: float) -> None:
        requests = self._target.requests
        self._turn = turn = self._turn + 1
        self._record.was_sent(scheduled)
        connection.send(requests[turn % len(requests)], scheduled, now)

    def _open(self) -> None:
        task = asyncio.get_running_loop().create_task(self._connect())
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = fault

    async def _connect(self) -> None:
        target = self._target
        while (now := self._clock()) < self._record.end or self._needed():
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), target.host, target.port, ssl=target.tls
                )
            except OSError as error:
                self._unreachable(now, str(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._connections.add(connection)
            return self._free(connection, self._clock())
        return None

    def _sweep(self, now: float) -> None:
        for connection in [c for c in self._connections if c.busy and now - c.scheduled > self._timeout_s]:
            self._record.failed(connection.scheduled, "timeout")
            self._drop(connection)
            self._replace()

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        self._connections.discard(connection)

    def _busy(self) -> bool:
        return any(connection.busy for connection in self._connections)

    def _stop(self) -> None:
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._connections):
            self._drop(connection)

    # The methods that differ between the two kinds of load.

    def _start(self) -> None:
        raise NotImplementedError

    def _free(self, connection: Connection, now: float) -> None:
        """A connection has nothing to do."""
        raise NotImplementedError

    def _replace(self) -> None:
        """A connection has gone."""
        raise NotImplementedError

    def _needed(self) -> bool:
        """True if another connection has work after the end of the window."""
        return False

    def _unreachable(self, scheduled: float, message: str) -> None:
        """An attempt to connect failed."""
        raise NotImplementedError

    def _done(self, now: float) -> bool:
        return now >= self._record.end and not self._busy()


class ClosedLoop(Load):
    """``concurrency`` callers; the next request is due when the last one's answer is there."""

    def __init__(self, target: Target, record: Record, timeout_s: float, concurrency: int) -> None:
        super().__init__(target, record, timeout_s)
        self._concurrency = concurrency

    def _start(self) -> None:
        for _ in range(self._concurrency):
            self._open()

    def _free(self, connection: Connection, now: float) -> None:
        if now < self._record.end:
            self._send(connection, now, now)

    def _replace(self) -> None:
        if self._clock() < self._record.end:
            self._open()

    def _unreachable(self, scheduled: float, message: str) -> None:
        self._record.was_sent(scheduled)
        self._record.failed(scheduled, "cannot connect", message)


class OpenLoop(Load):
    """``rate`` arrivals a second from ``start`` on (seconds of the clock). ``most`` connections at once."""

    def __init__(
        self,
        target: Target,
        record: Record,
        timeout_s: float,
        rate: float,
        start: float,
        most: int = 2000,
        seed: int = 7,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(target, record, timeout_s, clock)
        self._rate = rate
        self._most = most
        self._random = random.Random(seed)
        self._next = start + self._random.expovariate(rate)
        self._idle: list[Connection] = []
        self._waiting: deque[float] = deque()
        self._alarm: Alarm | None = None

    def _start(self) -> None:
        self._alarm = Alarm(self._arrive)
        self._arrive()

    def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.close()
        super()._stop()

    def _arrive(self) -> None:
        """Everything that is due by now goes out, or waits for a connection."""
        now = self._clock()
        end = self._record.end
        while self._next <= now and self._next < end:
            scheduled, self._next = self._next, self._next + self._random.expovariate(self._rate)
            self._record.was_late(scheduled, now)
            self._give(scheduled, now)
        if self._next < end and self._alarm is not None:
            self._alarm.set(self._next - self._clock())

    def _give(self, scheduled: float, now: float) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.finished:
                self._send(connection, scheduled, now)
                return
        self._waiting.append(scheduled)
        self._grow()

    def _grow(self) -> None:
        if (
            len(self._opening) < len(self._waiting)
            and len(self._connections) + len(self._opening) < self._most
        ):
            self._open()

    def _free(self, connection: Connection, now: float) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft(), now)
        else:
            self._idle.append(connection)

    def _replace(self) -> None:
        if self._waiting:
            self._grow()

    def _needed(self) -> bool:
        return bool(self._waiting)

    def _unreachable(self, scheduled: float, message: str) -> None:
        """Fail the request that waited for this connection: another attempt would find no server either."""
        if self._waiting:
            self._unsent(self._waiting.popleft(), "cannot connect", message)

    def _unsent(self, scheduled: float, reason: str, message: str = "") -> None:
        self._record.was_sent(scheduled)
        self._record.failed(scheduled, reason, message)

    def _sweep(self, now: float) -> None:
        super()._sweep(now)
        while self._waiting and now - self._waiting[0] > self._timeout_s:
            self._unsent(self._waiting.popleft(), "timeout")

    def _done(self, now: float) -> bool:
        return now >= self._record.end and not self._waiting and not self._busy()


class _Times(ctypes.Structure):
    """``struct itimerspec``: no repetition, then the time until it rings."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns"))


class Alarm:
    """Calls ``ring`` on this event loop once after each ``set``. Close it.

    Event loops round their own timers up to whole milliseconds, which at 5,000 arrivals a second would make bunches of
    five. Linux' timerfd wakes within some tens of microseconds.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        """Raises BadSetting where the system has no such timer."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timerfd_create"):
            raise BadSetting("--rate needs Linux: this system cannot time single requests; use --concurrency")
        self._handle: int = self._libc.timerfd_create(_MONOTONIC, _NONBLOCK)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._woken)

    def set(self, seconds: float) -> None:
        """Ring once after ``seconds``; replaces a time that was set before."""
        after_s, after_ns = divmod(max(int(seconds * 1e9), _SOONEST_NS), 10**9)
        self._libc.timerfd_settime(self._handle, 0, ctypes.byref(_Times(0, 0, after_s, after_ns)), None)

    def close(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)

    def _woken(self) -> None:
        try:
            os.read(self._handle, 8)
        except BlockingIOError:  # it was set anew in between
            return
        self._ring()
