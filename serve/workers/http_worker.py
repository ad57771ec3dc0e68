"""One HTTP worker: a process that accepts connections, and asks the engine process for answers."""

import asyncio
import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from ..access.access_control import AccessControl
from ..http.codecs.dialect import OURS, STRICT
from ..http.connection.polite_server import PoliteServer, accept_the_last
from ..http.limits.bounds import Bounds
from ..server import http_config
from ..settings import Settings
from .control import Control, Said, connection_of, signals_ignored
from .engine_app import EngineApp
from .engine_link import EngineLink
from .worker_front import WorkerFront

_FLUSH_EVERY_S = 1.0
_NO_DESCRIPTOR_S = 0.5  # until the next try where none is left
_HANDSHAKES_S = 2.0  # for TLS handshakes under way when the port is closed: a caller may never end one
_AGAIN_S = 0.05  # until a new channel is asked for: it may be lost at once, where the other end has no descriptor left
_LOG = logging.getLogger("halfeven")


def run_worker(
    settings: Settings, listener: socket.socket, control: Control, bounds: Bounds, needs_keys: bool
) -> None:
    """Serve connections until the parent ends it."""
    link = EngineLink(lambda: _ask_for_channel(control, _AGAIN_S))
    limits = settings.limits
    front = WorkerFront(
        EngineApp(lambda: link.calls),
        link,
        limits.body_bytes,
        limits.arrival_seconds,
        link.written,
        STRICT if settings.triton_strict else OURS,
        settings.guard,
        bounds,
        AccessControl(settings.keys, needs_keys, counted=False, patient=True),
    )
    config = http_config(settings, front, settings.certificates)
    config.lifespan = "off"
    _WorkerServer(config, listener, link, control).run()


def _ask_for_channel(control: Control, seconds: float) -> None:
    asyncio.get_running_loop().call_later(seconds, partial(control.send, alone=True))


class _WorkerServer(PoliteServer):
    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, link: EngineLink, control: Control
    ) -> None:
        super().__init__(config)
        self._listener, self._link, self._control = listener, link, control
        self._setting_up: set[asyncio.Task[Any]] = set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with signals_ignored():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._listener.setblocking(False)
        self._listen()
        self._control.listen(self._hear)
        self._control.send(up=True, alone=True)
        self._flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown([])
        self._link.flush()
        self._link.close()

    def _hear(self, said: Said, descriptors: list[int]) -> None:
        if "connect" in said:
            try:
                self._link.connect(*connection_of(descriptors))
            except OSError as error:
                _LOG.error("the engine process cannot be connected now: %s", error)
                _ask_for_channel(self._control, _NO_DESCRIPTOR_S)
        elif "leave" in said:
            self.grace_s = said["leave"]
            self.should_exit = True
        elif "hurry" in said:
            self._hurried = True

    def _flush(self) -> None:
        self._link.flush()
        asyncio.get_running_loop().call_later(_FLUSH_EVERY_S, self._flush)

    # The port, which all workers share. One connection is accepted at a time: an event loop that takes all that wait
    # would leave none to the other workers.

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _LOG.error("no connection can be accepted: %s", error)
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_NO_DESCRIPTOR_S, self._listen)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(self._set_up(connection))
        self._setting_up.add(task)
        task.add_done_callback(self._setting_up.discard)

    async def _set_up(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        except OSError as error:  # also what is wrong with a TLS handshake
            _LOG.debug("a connection was not set up: %s", error)
            connection.close()

    def _protocol(self) -> asyncio.Protocol:
        made: Any = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def _close_port(self, sockets: list[socket.socket] | None) -> None:
        await accept_the_last([self._listener])
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if self._setting_up:
            await asyncio.wait(self._setting_up, timeout=_HANDSHAKES_S)
