"""One keep-alive HTTP/1.1 connection of the load generator: bytes out, one answer back, nothing in between.

No futures, no tasks and no header objects: at 40,000 requests a second each of them would be measured as if
it were the server. An answer with a Content-Length is read here; any other goes through httptools.
"""

import asyncio
from typing import Protocol, cast

import httptools

CLOSED = b"\r\nconnection: close"


class Listener(Protocol):
    """The sender on a connection, called with the answer or the loss of it."""

    def answered(self, connection: "Connection", status: int, head: bytes, body: bytes) -> None:
        """The whole answer is here; ``head`` is in lower case, without the empty line at its end."""
        ...

    def lost(self, connection: "Connection") -> None:
        """The server has closed the connection, or sent something that is not HTTP."""
        ...


class Connection(asyncio.Protocol):
    """``scheduled`` and ``sent`` are the times of the request under way (seconds); ``busy`` while there is one."""

    __slots__ = (
        "_body", "_head", "_listener", "_missing", "_parser", "_status", "_transport", "_unparsed",
        "busy", "finished", "scheduled", "sent",
    )  # fmt: skip

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._unparsed = b""
        self._missing = 0
        self._body: list[bytes] = []
        self._status, self._head = 0, b""
        self._parser: httptools.HttpResponseParser | None = None
        self.busy = self.finished = False
        self.scheduled = self.sent = 0.0

    def send(self, request: bytes, scheduled: float, now: float) -> None:
        """Write one whole request. Only when the last was answered."""
        assert self._transport is not None
        self.busy, self.scheduled, self.sent = True, scheduled, now
        self._transport.write(request)

    def abort(self) -> None:
        """Give up the request under way without a call."""
        self.busy, self.finished = False, True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being an instance

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished:
            self.finished = True
            self._listener.lost(self)

    def data_received(self, data: bytes) -> None:
        if self._missing > 0:
            self._more(data)
        elif self._parser is not None:
            self._feed(self._parser, data)
        else:
            self._begin(self._unparsed + data if self._unparsed else data)

    def _begin(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._unparsed = data
            return
        self._unparsed = b""
        self._head = head = data[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        if not head.startswith(b"http/1.") or not self.busy:
            self._break()
        elif at < 0:
            self._parser = httptools.HttpResponseParser(self)
            self._feed(self._parser, data)
        else:
            stop = head.find(b"\r", at + 2)
            self._status = int(head[9:12])
            self._missing = int(head[at + 17 : stop if stop > 0 else None])
            self._body = []
            self._more(data[end + 4 :])

    def _more(self, piece: bytes) -> None:
        self._missing -= len(piece)
        if self._missing > 0:
            self._body.append(piece)
        elif self._missing < 0:
            self._break()
        else:
            self._answered(b"".join([*self._body, piece]) if self._body else piece)

    def _feed(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self._break()

    def _answered(self, body: bytes) -> None:
        self.busy = False
        if CLOSED in self._head:
            self.finished = True
            if self._transport is not None:
                self._transport.close()
        self._listener.answered(self, self._status, self._head, body)

    def _break(self) -> None:
        self.finished = True
        if self._transport is not None:
            self._transport.abort()
        self._listener.lost(self)

    # The methods that httptools calls.

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._status, self._parser = self._parser.get_status_code(), None
        self._answered(b"".join(self._body))
