"""The end of a connection: every request that was sent on it is answered first.

While the server shuts down (`polite_server.py`), the last answer on a connection has ``Connection: close``, and the
connection is closed after it. A connection without a request is closed only where its socket has no unread bytes: a
request that came meanwhile is read and answered first.

Source: RFC 9112 §9.3 and §9.6. Built on uvicorn.protocols.http.httptools_impl.HttpToolsProtocol.
"""

import fcntl
import termios
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ....models.errors import NotReady


def kept_header(seconds: int) -> tuple[bytes, bytes]:
    """The header that says how long an idle connection is kept."""
    return b"keep-alive", b"timeout=%d" % seconds


def no_time_left() -> NotReady:
    """The error for a request that still computes when the time for shutting down is over."""
    return NotReady("the server is shutting down and has no time left to answer; ask another one")


class AnsweringCycle(RequestResponseCycle):
    """uvicorn makes the object; `PoliteProtocol` gives it this class, and ``kept``, the header of an answer after which
    the connection is kept."""

    kept: tuple[bytes, bytes]

    async def send(self, message: Any) -> None:
        if not self.response_started and message["type"] == "http.response.start":
            if self.waiting_for_100_continue and self.more_body:
                # The caller waits to be told to send its body, and is refused: it may send the next request instead,
                # which would be read as the body.
                self.keep_alive = False
            headers = list(message.get("headers", []))
            if self.keep_alive and all(name.lower() != b"connection" for name, _ in headers):
                message = {**message, "headers": [*headers, self.kept]}
        await super().send(message)


class PoliteState(ServerState):
    """State that all connections of a server share. ``leaving``: the server shuts down; requests are still answered."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = False


class PoliteProtocol(HttpToolsProtocol):
    """Works under any uvicorn server; only a `PoliteServer` sets ``leaving``."""

    # The one whose answer was made the last by the server, not the caller.
    _last: RequestResponseCycle | None = None

    _running: RequestResponseCycle | None = None  # that was handed to the application last

    @property
    def leaving(self) -> bool:
        return getattr(self.server_state, "leaving", False)

    @property
    def is_last(self) -> bool:
        """True if the answer that begins now is the last on its connection because the server leaves."""
        return self.leaving and not self.pipeline

    @property
    def busy(self) -> bool:
        """True if a request is on its way in, computed or answered."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    @property
    def quiet_since_s(self) -> float:
        """The time when the last answer was complete, in seconds on the loop's clock; 0 where that is not known."""
        return 0.0

    @property
    def has_unread(self) -> bool:
        """True if the caller has sent bytes that are not read yet."""
        connection = self.transport.get_extra_info("socket")
        if connection is None:
            return False
        try:
            info = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
        except (OSError, ValueError):  # closed
            return False
        return any(info)

    def give_up(self) -> None:
        """The time for shutting down is over: answer the request under way. Its ASGI task is cancelled afterwards."""

    def shutdown(self) -> None:
        """The server shuts down. An answer that has begun cannot have ``Connection: close``: the next one has it."""
        cycle = self.cycle
        if not self.leaving:  # uvicorn's own server ends
            super().shutdown()
        elif isinstance(cycle, RequestResponseCycle) and not cycle.response_started and self.is_last:
            self._make_last(cycle)

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        self.cycle.__class__ = AnsweringCycle  # uvicorn has no other way to name the class
        cast(AnsweringCycle, self.cycle).kept = kept_header(self.timeout_keep_alive)
        if self.pipeline and before is not None and before is self._last and not before.response_started:
            before.keep_alive = True  # another request came with it
            self._last = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if self.is_last:
            self._make_last(cycle)
        super()._start_asgi_task(cycle, app)

    def _make_last(self, cycle: RequestResponseCycle) -> None:
        if cycle.keep_alive:
            cycle.keep_alive = False
            self._last = cycle

    def close_if_idle(self) -> None:
        """Close the connection where no request is under way and no byte is unread."""
        if not self.busy and not self.has_unread:
            self.transport.close()
