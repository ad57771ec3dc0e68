"""A listening socket in the event loop: connections are accepted here, and the refused ones are answered.

uvloop accepts connections in libuv, which closes those for which no descriptor is left, without an answer or a log
line. Here a few descriptors are kept back: with one of them such a connection is accepted, answered with 503 and
closed. One that is too many is answered in the same way, before it costs a parser. A refused connection is kept for a
moment, until its caller has closed it: closed at once, with a request unread, it would be reset, and the caller might
never see the answer.

Source: accept(2) (EMFILE, ENFILE), libuv's ``uv__emfile_trick``; RFC 9112, 9.6 for how a connection is closed.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ....models.errors import BadSetting, HalfevenError
from ...address import address
from ..error_mapping import NoDescriptor, TooManyConnections
from ..limits.bounds import ServerBounds
from ..limits.connections import Connections
from .guarded_protocol import refusal_of
from .tls import Secured, set_up_tls

_LOG = logging.getLogger("halfeven")
_KEPT_BACK = 4  # descriptors
_AT_ONCE = 16  # connections that are accepted before the event loop does something else
_MOST_AWAITED = 8  # refused connections: each has a descriptor
_END_S = 1.0  # for the caller of a refused connection to close it
_AGAIN_S = 0.5  # until the next try where not even a descriptor that was kept back is left
_PIECE = 65_536
_NONE_LEFT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_FULL = NoDescriptor("the server has no file descriptor left for another connection; try again later", 1.0)


def cannot_listen(host: str, port: int, error: OSError) -> BadSetting:
    """The sentence for an address that cannot be had: the system's reason, and the option to change."""
    advice = {
        errno.EADDRINUSE: "another server is there: stop it, or choose another --port",
        errno.EACCES: "choose a --port above 1023",
    }.get(error.errno or 0, "--host must be an address or a name of this machine")
    reason = str(error.strerror).partition(" (while attempting to bind")[0]  # Python names the address there
    return BadSetting(f"cannot listen on {address(host, port)}: {reason}; {advice}")


def listeners_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """A socket for each address of the host. Raises OSError where one of them cannot be had; an address of a kind that
    this machine has not is left out, where there is another one."""
    found = dict.fromkeys(
        socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )
    opened: list[socket.socket] = []
    lacking: OSError | None = None
    try:
        for family, _, _, _, place in found:
            try:
                opened.append(socket.create_server(place, family=family, backlog=backlog))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                lacking = error
    except OSError:
        for listener in opened:
            listener.close()
        raise
    if lacking is not None and not opened:
        raise lacking
    return opened


class Listening:
    """Accepts from one socket, whose owner this is, from `start` to `close`.

    ``protocol`` makes the protocol of a connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        bounds: ServerBounds,
    ) -> None:
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._connections, self._refused = bounds.connections, bounds.refused
        self._handshakes, self._seconds = Connections(max(bounds.connections.limit, _AT_ONCE)), bounds.seconds
        self._kept_back: list[int] = []
        self._again: asyncio.TimerHandle | None = None
        self._coming = 0  # connections that were accepted and have no protocol yet
        self._setting_up: set[asyncio.Task[Any]] = set()
        self._refusing: set[asyncio.Task[Any]] = set()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (self._listener,)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._keep_back()
        self._listen()

    def close(self) -> None:
        """Accept no more. Connections that are set up go on (`settled`)."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        while self._kept_back:
            os.close(self._kept_back.pop())

    async def settled(self, seconds: float) -> None:
        """Wait until the connections that were accepted are set up: a caller may never end its TLS handshake."""
        if self._setting_up:
            await asyncio.wait(self._setting_up, timeout=seconds)
        for task in self._refusing:
            task.cancel()

    # Accepting.

    def _listen(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        if len(self._kept_back) + len(self._refusing) < _KEPT_BACK:
            self._keep_back()
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._without_descriptor(error)
                return
            connection.setblocking(False)
            if self._tls is None and not self._connections.has_room(self._coming):
                limit = self._connections.limit
                self._refuse(connection, TooManyConnections(f"{limit} connections are open; try again later"))
            elif self._tls is not None and not self._handshakes.has_room():
                self._refused.count("too many TLS handshakes are under way")
                connection.close()
            else:
                with suppress(OSError):  # a caller that has gone already
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._coming += 1
                secured = None if self._tls is None else Secured(self._tls, self._made, self._seconds)
                if secured is not None:
                    self._handshakes.enter(secured)
                self._run(self._set_up(connection, secured), self._setting_up)

    async def _set_up(self, connection: socket.socket, secured: Secured | None) -> None:
        try:
            if secured is None:
                await self._loop.connect_accepted_socket(self._made, connection)
            else:
                await set_up_tls(connection, secured)
        except OSError as error:  # also what is wrong with a TLS handshake
            _LOG.debug("a connection was not set up: %s", error)
            connection.close()
        finally:
            if secured is not None:
                self._handshakes.leave(secured)

    def _made(self) -> asyncio.Protocol:
        self._coming -= 1
        return self._protocol()

    def _run(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[Any]]) -> None:
        task = self._loop.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)

    # Refusing.

    def _without_descriptor(self, error: OSError) -> None:
        """Accept one connection with a descriptor that was kept back; wait, where there is none."""
        connection = None
        if error.errno in _NONE_LEFT and self._kept_back:
            os.close(self._kept_back.pop())
            with suppress(OSError):
                connection, _ = self._listener.accept()
        if connection is not None:
            connection.setblocking(False)
            self._refuse(connection, _FULL)
            return
        if not self._refusing:  # else the first that ends gives its descriptor back
            self._refused.count(f"no connection can be accepted now: {error}")
            self._keep_back()
        self._loop.remove_reader(self._listener.fileno())
        self._again = self._loop.call_later(_AGAIN_S, self._listen)

    def _refuse(self, connection: socket.socket, error: HalfevenError) -> None:
        self._refused.count(str(error))
        awaited = len(self._refusing) < _MOST_AWAITED
        self._run(self._answer(connection, refusal_of(error), awaited), self._refusing)

    async def _answer(self, connection: socket.socket, answer: bytes, awaited: bool) -> None:
        """Answer and close. A caller that speaks TLS could not read the answer."""
        try:
            async with asyncio.timeout(_END_S):
                if self._tls is None:
                    await self._loop.sock_sendall(connection, answer)
                    connection.shutdown(socket.SHUT_WR)
                while awaited and self._tls is None and await self._loop.sock_recv(connection, _PIECE):
                    pass
        except (OSError, TimeoutError):
            return
        finally:
            connection.close()
            self._keep_back()
            if self._again is not None:
                self._listen()

    def _keep_back(self) -> None:
        while len(self._kept_back) < _KEPT_BACK and self._listener.fileno() >= 0:
            try:
                self._kept_back.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return
