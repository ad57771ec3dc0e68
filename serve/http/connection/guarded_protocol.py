"""HTTP/1.1 connections with bounds: on heads, on times, on their number, and on answers that are not read.

`HotProtocol` (`hot_protocol.py`) is a subclass; the base class is `PoliteProtocol` over uvicorn's. Every connection has
one timer. It is not set anew for each request (that would cost 2 to 5 µs): the time at which the connection is to be
closed is a number, and the timer looks at it when it fires.

Where a request ends, and what of it is refused, is in `framing.py`.

Source: RFC 9112 9.8 for how a refused connection is closed, RFC 6585 for 431.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from ....models.errors import BadRequest, HalfevenError
from ..error_mapping import HeadTooLarge, TooManyConnections, UrlTooLong, body_of, headers_of, status_of
from ..limits.bounds import ServerBounds
from ..limits.request_limits import DEFAULTS
from ..limits.unsent import Unsent
from .framing import Cuts, body_length, check_request_line, without_upgrade
from .half_closed import HalfClosed
from .polite_protocol import PoliteProtocol, no_time_left

MAX_HEAD_BYTES, MAX_HEADERS = DEFAULTS.head_bytes, DEFAULTS.headers
MAX_QUEUED = DEFAULTS.requests_ahead
_PER_CHUNK = 32  # bytes around each chunk of a body that are always allowed
# The time from a refusal to the end: closed at once, with bytes unread, it would not reach the caller.
_REFUSAL_SECONDS = 2.0
_LOOK_AGAIN_SECONDS = 0.05
_LATER_SECONDS = 1.0  # an idle connection is kept for so much longer than its caller was told
_OF_1_1 = {"http_version": "1.1"}
_IDLE_SECONDS = 1.0  # from then on a connection makes room for a newcomer


class GuardedProtocol(PoliteProtocol):
    """One connection. Requests are answered by `HotProtocol` and uvicorn."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        bounds: ServerBounds | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds or ServerBounds()
        self._in_head = False
        self._in_message = False
        self._refused = False  # further bytes are ignored
        self._fault: HalfevenError | None = None  # why a callback stopped the parser
        self.url = b""
        self._cuts = Cuts()
        self._pieces: list[bytes] = []  # the data of the head: from the piece on that it began in
        self._head_bytes = 0  # of the earlier pieces of data that have bytes of the head
        self._first_bytes = 0  # of the first of these pieces, which may begin with the end of another request
        self._piece_bytes = 0  # of the piece that the parser has now
        self._chunked = False
        self._trailers = self._dropped = 0  # dropped: the bytes of a body that came after its answer
        # The bytes of a chunked body that are not data, less those that each chunk needs.
        self._framing_bytes = 0
        self._idle_since = 0.0  # on the loop's clock; means something while no request is under way
        self._close_at: float | None = None  # on the loop's clock; None while the server is at work
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._unsent: Unsent | None = None
        self._half_closed: HalfClosed | None = None
        self._answered_last: HalfevenError | None = None  # for what came behind requests that are under way

    # The methods that the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unsent = Unsent(transport, self.loop, self._bounds.budget)
        self._idle_since = self.loop.time()
        if self._bounds.connections.enter(self):
            self._close_in(self._bounds.seconds)
        else:
            self._refused = True
            limit = self._bounds.connections.limit
            error = TooManyConnections(f"{limit} connections are open; try again later")
            self._bounds.refused.count(str(error))
            self._write_refusal(error)
            transport.close()

    def data_received(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(data) and not self._refused:
            end = self._cuts.end(data, at)
            if (again := self._feed(view[at:end])) is None:
                at = end
            else:  # a new parser begins with this head
                data, at = again + data[end:], 0
                view = memoryview(data)

    def _feed(self, piece: memoryview) -> bytes | None:
        """Have the parser read the piece. Where the head that ends with it asks for another protocol: returns the head
        that is to be read in its place."""
        was_in_head, self._piece_bytes = self._in_head, len(piece)
        if was_in_head or not self._in_message:
            self._pieces.append(bytes(piece))
        parser = self.parser
        assert parser is not None
        try:
            parser.feed_data(piece)
        except HttpParserUpgrade:
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            return without_upgrade(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        except HttpParserError as error:
            self._refuse(self._fault or BadRequest(f"the request is not HTTP/1.1: {error}"))
        else:
            if not self._in_head:
                self._pieces.clear()
            self._count(len(piece), was_in_head)
        return None

    def eof_received(self) -> bool:  # type: ignore[override]
        """The caller has sent its last byte: the connection stays where requests are to be answered on it."""
        asked: list[Any] = [cycle for cycle, _ in self.pipeline]  # the newest first
        if (running := self.under_way()) is not None:
            asked.append(running)
        # The request will never be whole.
        if self._in_message and not self._in_head and asked and asked[0] is self.cycle:
            if self.pipeline:
                self.pipeline.popleft()
            asked.pop(0)
            self.cycle = asked[0] if asked else self.cycle
        if not asked or self.transport.is_closing() or getattr(asked[0], "chunked_encoding", False):
            return False  # a stream that has begun goes on for as long as its reader wishes, who has left
        if self._answered_last is None:
            asked[0].keep_alive = False
        self._half_closed = HalfClosed(self.transport, self.loop, self._may_send_interim)
        return True

    def under_way(self) -> Any:
        """The cycle that is being answered now."""
        running = self._running
        return running if running is not None and not running.response_complete else None

    def give_up(self) -> None:
        cycle = self.under_way()
        if cycle is None or cycle.response_started or cycle.disconnected:
            return
        cycle.disconnected = True  # what its task sends when it is cancelled is not an answer
        default_headers = self.server_state.default_headers
        self.transport.write(refusal_of(no_time_left(), cycle.scope["path"], default_headers))
        self.transport.close()

    def _may_send_interim(self) -> bool | None:
        cycle = self.under_way()
        if cycle is None:
            return None
        begun = getattr(cycle, "response_started", False)
        return not begun and getattr(cycle, "scope", _OF_1_1)["http_version"] == "1.1"

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unsent is not None:
            self._unsent.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unsent is not None:
            self._unsent.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.connections.leave(self)
        if self._half_closed is not None:
            self._half_closed.end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent is not None:
            self._unsent.end()
        super().connection_lost(exc)

    # The methods that the parser calls.

    def begin_message(self) -> None:
        """Begin to count; `on_message_begin` calls this first."""
        self._in_head = self._in_message = True
        self._head_bytes = self._first_bytes = self._framing_bytes = self._trailers = self._dropped = 0
        self._chunked = False
        self._close_in(self._bounds.seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer: nothing here asks for one
            self._trailers += 1
            if self._trailers > MAX_HEADERS:
                raise self._stopping(HeadTooLarge(f"the body has more than {MAX_HEADERS} trailers"))
            return
        super().on_header(name, value.rstrip(b" \t"))  # the parser has left out those before the value alone
        if len(self.headers) > MAX_HEADERS:
            raise self._stopping(HeadTooLarge(f"the request has more than {MAX_HEADERS} headers; send fewer"))

    def check_head(self) -> None:
        """Check the head against the bounds; `on_headers_complete` calls this first.

        Raises HeadTooLarge, UrlTooLong, BadRequest.
        """
        if self._head_bytes + self._piece_bytes > MAX_HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                raise self._stopping(self._too_large())
        assert self.parser is not None
        version = self.parser.get_http_version()
        try:
            check_request_line(self._pieces, self.parser.get_method(), self.url, version)
            length = body_length(self.headers, version)
        except HalfevenError as error:
            raise self._stopping(error) from None
        self._chunked, self._cuts.body_left = length is None, length or 0
        if len(self.pipeline) >= MAX_QUEUED:
            raise self._stopping(
                BadRequest(f"more than {MAX_QUEUED} requests were sent ahead on one connection")
            )
        self._in_head = False
        self._close_at = None

    def reads_again(self) -> bool:
        """True if the request asks for another protocol: then the parser does not read its body, and a head
        without that wish is read in its place. To be called first in `on_headers_complete` and
        `on_message_complete`."""
        parser = self.parser
        if not parser.should_upgrade():
            return False
        try:
            check_request_line(self._pieces, parser.get_method(), self.url, parser.get_http_version())
        except HalfevenError as error:
            raise self._stopping(error) from None
        return True

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) + _PER_CHUNK
        if self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > DEFAULTS.body_bytes:
                self._end_with(None)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def _stopping(self, fault: HalfevenError) -> HalfevenError:
        """The error to raise in a callback: the parser then stops, and raises an error of its own instead."""
        self._fault = fault
        return fault

    def _count(self, nbytes: int, was_in_head: bool) -> None:
        """Count the bytes that the parser has read."""
        if self._in_head:
            self._head_bytes += nbytes
            if not was_in_head:
                self._first_bytes = nbytes
            if self._head_bytes - self._first_bytes > MAX_HEAD_BYTES:
                self._refuse(self._too_large())
        elif self._in_message and self._chunked:
            self._framing_bytes = 0 if was_in_head else self._framing_bytes + nbytes
            if self._framing_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    HeadTooLarge(
                        f"the body has more than {MAX_HEAD_BYTES} bytes of chunk extensions and trailers"
                    )
                )

    def _too_large(self) -> HalfevenError:
        too_large = f"the request's head has more than {MAX_HEAD_BYTES} bytes"
        if len(self.url) > MAX_HEAD_BYTES // 2:
            return UrlTooLong(f"{too_large}, most of them its URL; send a shorter one")
        return HeadTooLarge(f"{too_large}; send fewer and shorter headers")

    # Refusals before there is a request that an application could answer.

    def _refuse(self, error: HalfevenError) -> None:
        """Answer with the error and end the connection. Requests that came before are answered first."""
        self._refused = True
        if self._fault is None and isinstance(error, BadRequest):
            self._bounds.malformed.count(str(error))
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            reads_body = self._in_message and not self._in_head
            if reads_body and self.pipeline:  # the refused request has not begun: others are before it
                self.pipeline.popleft()
                self.cycle = self.pipeline[0][0] if self.pipeline else self.under_way()
            if not reads_body or self.cycle is not cycle:  # another request than the one that is refused
                self._answered_last = error
                self._close_at = None
                return
            cycle.disconnected = True  # the reader of its body learns that none will come
            cycle.message_event.set()
            if getattr(cycle, "response_started", False):
                self._close_in(_REFUSAL_SECONDS)
                return
        elif self._in_message and not self._in_head:  # its answer has been given
            self.transport.close()
            return
        self._end_with(error)

    def _end_with(self, error: HalfevenError | None) -> None:
        self._refused = True
        if error is not None:
            self._write_refusal(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.pause_reading()  # a caller that goes on sending is not read any more
        self._close_in(_REFUSAL_SECONDS)

    def _write_refusal(self, error: HalfevenError) -> None:
        default_headers = self.server_state.default_headers
        self.transport.write(refusal_of(error, self.url.decode("latin-1"), default_headers))

    # Time.

    @property
    def has_unread(self) -> bool:
        """The rest of a body whose answer was given does not count: nothing waits for it."""
        return not (self._in_message and not self._in_head) and super().has_unread

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            assert self._unsent is not None
            self._unsent.watch()  # it closes when all was taken
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self._answered_last is not None:
            self._end_with(self._answered_last)
            return
        self._idle_since = self.loop.time()
        self._close_in(self._bounds.seconds if self._in_head else self.timeout_keep_alive + _LATER_SECONDS)

    def is_idle(self) -> bool:
        """True if `Connections` may close the connection."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        return not under_way and not self.has_unread and self.loop.time() - self._idle_since >= _IDLE_SECONDS

    def close_idle(self) -> None:
        """Close the connection, at the order of `Connections`. The unsent rest of an answer is lost, where its caller
        has not read it."""
        self.transport.abort()

    def _close_in(self, seconds: float) -> None:
        """Close the connection after ``seconds``, unless this is called again or `_close_at` is None by then."""
        at = self._close_at = self.loop.time() + seconds
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer, self._timer_at = self.loop.call_later(seconds, self._look_at_clock), at

    def _look_at_clock(self) -> None:
        self._timer = None
        if self._close_at is None:
            return
        left = self._close_at - self.loop.time()
        if left > 0:
            self._close_in(left)
        else:
            self._close_at = None
            self._time_is_up()

    def _time_is_up(self) -> None:
        """The time for the next request, or for the rest of a head or body, is over."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not self._refused:
            return  # the request is being computed; after its answer the time begins again
        if self.has_unread and not self._refused:  # bytes came that have not been read yet
            self._close_in(_LOOK_AGAIN_SECONDS)
            return
        if not self.transport.is_closing():
            self.transport.close()
        assert self._unsent is not None
        self._unsent.watch()


def refusal_of(
    error: HalfevenError, path: str = "", default_headers: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """Head and body of the answer to a connection that is refused before there is a request that an application could
    answer. ``path``: of the request, as far as it is known; the body has that path's format."""
    body, kind = body_of(error, path)
    headers = {"content-type": kind, "content-length": str(len(body)), **headers_of(error)}
    lines = [STATUS_LINE[status_of(error)]]
    for name, value in default_headers:
        lines += (name, b": ", value, b"\r\n")
    lines += (f"{name}: {value}\r\n".encode() for name, value in headers.items())
    return b"".join((*lines, b"connection: close\r\n\r\n", body))
