"""uvicorn's server with another shutdown: every accepted request is answered.

1. **Leaving.** The first signal: the server is not ready any more, every further answer has ``Connection: close``. The
   port stays open for the grace time (SIGTERM; Ctrl-C has none), so that load balancers see it before callers are
   refused.
2. **Closing.** The grace time is over, or a second signal came: the port is closed after the last accepted connection;
   requests are answered; a connection without a request is closed when it was quiet for a moment and has no unread
   bytes.
3. **Gone.** No connection is open any more, or the time for shutting down is over: requests that still compute are
   answered with 503. A third signal ends the process at once.
"""

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Protocol

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from ....models.machine.usable_cores import usable_cores
from ..limits.bounds import ServerBounds
from ..routes.infer import InferFront
from .listening import Listening, cannot_listen, listeners_at
from .polite_protocol import PoliteProtocol, PoliteState

logger = logging.getLogger("halfeven")
QUIET_S = 0.25  # of a kept-alive connection: longer than a busy caller pauses between two requests
_HANDSHAKE_S = 0.1  # handshakes that have begun end meanwhile
_ACCEPT_S = 2.0  # for a queue that is not emptied, because there is no descriptor left
_HANDSHAKES_S = 2.0  # for TLS handshakes under way when the port is closed: a caller may never end one
_LOOK_EVERY_S = 0.02
_TICK_S = 1.0  # the answers' Date
_SO_ATTACH_FILTER = 26
_TCP_INFO_QUEUE = 24  # the offset of tcpi_unacked
# Classic BPF over the TCP header: load the flags; SYN without ACK is dropped (length 0), all else kept.
_NO_NEW_ONES = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # A = byte 13: the flags
        (0x54, 0, 0, 0x12),  # A &= SYN | ACK
        (0x15, 0, 1, 0x02),  # A == SYN?
        (0x06, 0, 0, 0),
        (0x06, 0, 0, 0x7FFFFFFF),
    )
)


class Beside(Protocol):
    """A server of another protocol over the same application. ``port`` is the real one after `start`."""

    port: int

    async def start(self) -> None: ...

    async def stop(self, grace_s: float | None) -> None:
        """Take no new requests, answer those under way for at most ``grace_s`` seconds (None: until they end)."""
        ...


async def _accept_the_last(listeners: Sequence[socket.socket]) -> None:
    """Let no new handshake begin, and return when every waiting connection has been accepted.

    A connection whose handshake is over waits in the kernel until it is accepted. Its caller may have sent a request
    already, and closing the socket would reset it. So a filter drops the first packet (SYN) of new handshakes (the
    caller's kernel sends it again after a second and is refused then, before anything was asked).

    Source: Linux, socket(7) SO_ATTACH_FILTER, tcp(7) TCP_INFO (of a listening socket: ``tcpi_unacked`` is its queue).
    """
    held_off = [hold_off(listener) for listener in listeners]
    if any(held_off):
        await asyncio.sleep(_HANDSHAKE_S)
    end_s = asyncio.get_running_loop().time() + _ACCEPT_S
    while all(held_off) and any(map(waiting_in, listeners)) and asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(0)


class PoliteServer(uvicorn.Server):
    """``grace_s``: seconds that the port stays open after SIGTERM; ``on_leaving``: makes the server not ready;
    ``beside`` starts before this server does, and ends with it.

    uvicorn's ``timeout_graceful_shutdown`` bounds the wait for requests under way.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        grace_s: float = 0.0,
        on_leaving: Callable[[], None] = lambda: None,
        quiet_s: float = QUIET_S,
        beside: Beside | None = None,
    ) -> None:
        super().__init__(config)
        self._state = self.server_state = PoliteState()
        self.grace_s, self._quiet_s, self._on_leaving = grace_s, quiet_s, on_leaving
        self._hurried, self.beside = False, beside

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Python's own number, with the cores that it may use instead of those of the machine.
        pool = ThreadPoolExecutor(usable_cores() + 4, "halfeven-aside")
        asyncio.get_running_loop().set_default_executor(pool)
        await super().startup([])  # connections are accepted here instead
        has_started, self.started = self.started, False
        config = self.config
        try:
            if self.beside is not None:
                await self.beside.start()
            opened = listeners_at(config.host, config.port, config.backlog) if sockets is None else sockets
        except BaseException as error:
            await self.lifespan.shutdown()
            if isinstance(error, OSError):
                raise cannot_listen(config.host, config.port, error) from error
            raise
        bounds = config.app.bounds if isinstance(config.app, InferFront) else ServerBounds()
        self.servers: list[Listening] = [  # type: ignore[assignment] (uvicorn looks at it only where it made it)
            Listening(one, self._protocol, config.ssl, bounds) for one in opened
        ]
        for one in self.servers:
            one.start()
        self.started = has_started

    def _protocol(self) -> asyncio.Protocol:
        made: Any = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at each signal, which goes one step further. A signal may come between any two instructions."""
        self._captured_signals.append(sig)
        if not self.should_exit:
            if sig == signal.SIGINT:
                self.grace_s = 0.0
            self.should_exit = True
            self._on_leaving()
        elif not self._hurried:
            self._hurried = True
        else:
            self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn raises the signal again at the end; here a server that ended as asked exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.force_exit:
            signal.raise_signal(self._captured_signals[-1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn calls it once, when the server is to end."""
        self._on_leaving()
        self._state.leaving = True
        for connection in self._connections():
            connection.shutdown()
        await self._wait_out_the_grace()
        grace_s = self.config.timeout_graceful_shutdown
        other = None if self.beside is None else asyncio.ensure_future(self.beside.stop(grace_s))
        await self._close_port()
        await self._answer_the_rest()
        if other is not None:
            await other
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _wait_out_the_grace(self) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.grace_s
        tick_s = 0.0
        while loop.time() < end_s and not self._hurried:
            if loop.time() >= tick_s:
                await self.on_tick(0)
                tick_s = loop.time() + _TICK_S
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _close_port(self) -> None:
        await _accept_the_last([listener for one in self.servers for listener in one.sockets])
        for one in self.servers:
            one.close()
        for one in self.servers:
            await one.settled(_HANDSHAKES_S)

    async def _answer_the_rest(self) -> None:
        loop = asyncio.get_running_loop()
        closed_s = loop.time()
        end_s = closed_s + (self.config.timeout_graceful_shutdown or float("inf"))
        await asyncio.sleep(_LOOK_EVERY_S)  # the connection that was accepted last is set up meanwhile
        while (self._state.connections or self._state.tasks) and not self.force_exit:
            if loop.time() >= end_s:
                await self._give_up()
                return
            for connection in self._connections():
                if loop.time() >= max(closed_s, connection.quiet_since_s) + self._quiet_s * (
                    not self._hurried
                ):
                    connection.close_if_idle()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _give_up(self) -> None:
        """A request that still computes is answered with 503 before its connection is closed."""
        logger.error("%d requests were not answered in the time for shutting down", len(self._state.tasks))
        for connection in self._connections():
            connection.give_up()
        for task in self._state.tasks:
            task.cancel()
        await asyncio.sleep(_HANDSHAKE_S)  # the answers go out
        for connection in self._connections():
            connection.transport.abort()
        await asyncio.sleep(0)  # the loop ends with no connection open

    def _connections(self) -> list[PoliteProtocol]:
        return [one for one in self._state.connections if isinstance(one, PoliteProtocol)]


def hold_off(listener: socket.socket) -> bool:
    """Let no new handshake begin. False where the system has no such filter: then a few connections may be reset."""
    program = ctypes.create_string_buffer(_NO_NEW_ONES)
    filter = struct.pack("HL", len(_NO_NEW_ONES) // 8, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)
    except OSError as error:
        logger.debug("new connections cannot be held off here: %s", error)
        return False
    return True


def waiting_in(listener: socket.socket) -> int:
    """Connections that wait to be accepted; 0 where the system does not tell."""
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_QUEUE + 4)
    except (OSError, AttributeError):  # only Linux has the constant
        return 0
    return struct.unpack_from("I", info, _TCP_INFO_QUEUE)[0] if len(info) >= _TCP_INFO_QUEUE + 4 else 0
