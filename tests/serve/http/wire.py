"""One connection of the server without a socket: its transport and its clock are moved by the test."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from halfeven.serve.http.connection.hot_protocol import HotProtocol
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from uvicorn.config import Config
from uvicorn.server import ServerState

from ..conftest import HISTORY, FakeRoster, make_roster

LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
INFER = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


class Transport:
    """A transport without a socket. What the server writes is kept in ``written``; ``unsent`` is what the caller has
    not taken of it."""

    def __init__(self) -> None:
        self.written, self.unsent = b"", 0
        self.closed = self.aborted = self.half_closed = self.reading_paused = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.written += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False


class Wire(Transport):
    """A connection without a socket, for use inside a running loop."""

    def __init__(self, app: Any, root_path: str = "") -> None:
        super().__init__()
        self.now, self.timers = 1000.0, list[asyncio.TimerHandle]()
        config = Config(app, lifespan="off", proxy_headers=False, log_level="critical", timeout_keep_alive=5)
        config.load()
        self.protocol = HotProtocol(config, ServerState(), {}, cast(Any, self), root_path)
        self.protocol.connection_made(cast(Any, self))

    async def send(self, *pieces: bytes) -> bytes:
        """All that was answered so far."""
        for piece in pieces:
            if not self.closed:
                self.protocol.data_received(piece)
            await self.settled()
        return self.written

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def after(self, seconds: float) -> None:
        """Move the clock on by ``seconds``. Timers fire one by one, each at its time."""
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.when() <= end]:
            timer = min(due, key=lambda one: one.when())
            self.timers.remove(timer)
            self.now = max(self.now, timer.when())
            timer._run()
        self.now = end

    # The methods of a loop.

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.now + seconds, then, (), cast(Any, self))
        self.timers.append(timer)
        return timer

    def create_task(self, steps: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(steps)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context["exception"]

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        self.timers.remove(timer)


def on_a_wire(
    steps: Callable[[Wire], Awaitable[Any]],
    bounds: ServerBounds | None = None,
    roster: FakeRoster | None = None,
) -> Any:
    """Run the steps on a connection to the application as it is served: 10 seconds for heads and bodies."""

    async def run() -> Any:
        wire = wires(bounds, roster)()
        try:
            return await steps(wire)
        finally:
            wire.protocol.connection_lost(None)
            await wire.settled()

    return asyncio.run(run())


def wires(bounds: ServerBounds | None = None, roster: FakeRoster | None = None) -> Callable[[], Wire]:
    """Each call is one more connection to one server."""
    found = roster or make_roster()
    shared = bounds or ServerBounds(10.0)
    front = InferFront(build_app(found, lambda: b"", HISTORY, body_timeout_s=10.0), found, bounds=shared)
    return lambda: Wire(front)


def statuses(written: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", written)]
