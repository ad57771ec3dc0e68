"""A connection on which the caller has sent its last byte: has it only ended its requests, or left?

Both look the same: the end of the data. A caller that still reads is answered, and then the connection is closed. One
that has left must not hold a place in a queue. So, where the answer takes longer than a moment, an interim answer is
sent, which every client of HTTP/1.1 skips: the system of a caller that has left answers it with a reset, and the state
of the socket says so.

Source: RFC 9110 15.2 (interim answers), RFC 9293 3.10.7 (the reset), tcp(7) TCP_INFO.
"""

import asyncio
import socket
from collections.abc import Callable

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_S, _LONGEST_S = 0.1, 1.0  # from the end of the data to the interim answer; between two looks
_CLOSED = 7  # TCP_CLOSE in the kernel's tcp_states.h: a reset came


class HalfClosed:
    """``may_ask``: whether an interim answer may be sent now (None: nothing is under way any more)."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        may_ask: Callable[[], bool | None],
    ) -> None:
        self._transport, self._loop, self._may_ask = transport, loop, may_ask
        self._asked, self._pause_s = False, _FIRST_S
        self._timer = loop.call_later(_FIRST_S, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        may_ask = self._may_ask()
        if may_ask is None or self._transport.is_closing():
            return
        if has_reset(self._transport):
            self._transport.abort()
            return
        if may_ask and not self._asked:
            self._asked, self._pause_s = True, _FIRST_S
            self._transport.write(INTERIM)
        else:
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        self._timer = self._loop.call_later(self._pause_s, self._look)


def has_reset(transport: asyncio.BaseTransport) -> bool:
    """True if the other end has reset the connection; False where the system does not tell."""
    connection = transport.get_extra_info("socket")
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED
    except (OSError, AttributeError):  # no socket of TCP; only Linux has the constant
        return False
