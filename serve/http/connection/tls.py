"""TLS on an accepted connection.

The TLS of asyncio and uvloop closes a connection when the caller ends its side, before an answer that is under way.
Here the protocol's `eof_received` decides, as on a connection without TLS: a `close_notify` ends one direction alone.

Source: RFC 8446, 6.1; `ssl.SSLObject`, which does everything but the reading and writing of bytes.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

_IDLE_SECONDS = 1.0  # from then on a handshake makes room for another one
_PIECE = 1 << 18


class Secured(asyncio.Transport, asyncio.Protocol):
    """The protocol of the bytes below TLS, and the transport of the protocol above, which ``made`` gives.

    ``ready`` is done when the handshake is; it has an OSError where the handshake failed, also after ``seconds``.
    """

    _raw: asyncio.Transport
    _above: asyncio.Protocol | None = None  # from the end of the handshake on
    _has_ended = False  # the caller has ended its side
    _began = float("inf")  # the time of the connection, on the loop's clock

    def __init__(self, context: ssl.SSLContext, made: Callable[[], asyncio.Protocol], seconds: float) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._made = made
        self._facts = {"sslcontext": context, "ssl_object": self._tls}
        self.ready: asyncio.Future[None] = loop.create_future()
        self._too_late = loop.call_later(seconds, lambda: self._raw.abort())

    # The methods that `Connections` calls while the handshake is under way.

    def is_idle(self) -> bool:
        """True if the handshake may end for another one: it takes long, whatever its caller sends meanwhile."""
        return self._loop.time() - self._began >= _IDLE_SECONDS

    def close_idle(self) -> None:
        self._raw.abort()

    # The methods that the transport below calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw, self._began = cast(asyncio.Transport, transport), self._loop.time()

    def data_received(self, data: bytes) -> None:
        if self._has_ended or self._raw.is_closing():
            return  # OpenSSL reads nothing behind the alert: kept, it would grow
        self._in.write(data)
        try:
            self._read()
        except ssl.SSLError as error:
            self._fail(error)
        self._flush()

    def _read(self) -> None:
        """Go on with the handshake, or hand on what was received. Raises SSLError."""
        pieces: list[bytes] = []
        with suppress(ssl.SSLWantReadError):
            if self._above is None:
                self._tls.do_handshake()
                self._begin()
            while piece := self._tls.read(_PIECE):
                pieces.append(piece)
            self._has_ended = True
        if self._above is None:
            return
        if pieces:
            self._above.data_received(b"".join(pieces))
        if self._has_ended and not self.is_closing() and not self._above.eof_received():
            self.close()

    def _begin(self) -> None:
        self._too_late.cancel()
        self._above = self._made()
        self._above.connection_made(self)
        self.ready.set_result(None)

    def eof_received(self) -> bool:
        """True if the connection stays open after the caller has ended its side, with an alert or without."""
        if self._above is None or self.is_closing():
            return False
        before, self._has_ended = self._has_ended, True
        if before or self._above.eof_received():
            return True
        self._notify()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._too_late.cancel()
        if not self.ready.done():
            self.ready.set_exception(exc or ConnectionResetError("the handshake did not end"))
        if self._above is not None:
            self._above.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._above is not None:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._above is not None:
            self._above.resume_writing()

    # The methods that the protocol above calls.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        left = memoryview(data)
        while left:
            left = left[self._tls.write(left[:_PIECE]) :]
        self._flush()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._notify()
        self._raw.write_eof()

    def close(self) -> None:
        if not self.is_closing():
            self._notify()
            self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def is_reading(self) -> bool:
        return self._raw.is_reading()

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._facts[name] if name in self._facts else self._raw.get_extra_info(name, default)

    # The records of TLS.

    def _notify(self) -> None:
        """Send the caller TLS's closing alert (close_notify): no more data comes."""
        with suppress(ssl.SSLError):  # the answer to it is not waited for
            self._tls.unwrap()
        self._flush()

    def _flush(self) -> None:
        if (out := self._out.read()) and not self._raw.is_closing():
            self._raw.write(out)

    def _fail(self, error: ssl.SSLError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        self._flush()  # the alert that says why
        self._raw.close()


async def set_up_tls(connection: socket.socket, secured: Secured) -> None:
    """Make the TLS connection of a socket. Raises OSError where the handshake fails."""
    await asyncio.get_running_loop().connect_accepted_socket(lambda: secured, connection)
    await secured.ready
