"""One HTTP worker: a process that accepts connections, and asks the engine process for answers."""

import asyncio
import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import uvicorn

from ..access.access_control import AccessControl
from ..http.codecs.dialect import OURS, STRICT
from ..http.connection.polite_server import PoliteServer, accept_the_last
from ..http.limits.bounds import Bounds
from ..http.limits.worker_threads import WorkerThreads, default_threads
from ..http.web_guard import WebGuard, read_names
from ..server import http_config
from ..settings import Settings
from .control import Control, Said, connection_of, signals_ignored
from .engine_app import EngineApp
from .engine_link import EngineLink
from .worker_front import WorkerFront

_FLUSH_EVERY_S = 1.0
_NO_DESCRIPTOR_S = 0.5  # until the next try where none is left
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
        WebGuard(settings.host, read_names(settings.allowed_hosts)),
        bounds,
        AccessControl(settings.keys, needs_keys, counted=False, patient=True),
    )
    front.worker_threads = WorkerThreads(default_threads(settings.http_workers))
    config = http_config(settings, front, settings.certificates)
    config.lifespan = "off"
    _WorkerServer(config, listener, link, control).run()


def _ask_for_channel(control: Control, seconds: float) -> None:
    asyncio.get_running_loop().call_later(seconds, partial(control.send, alone=True))


class _WorkerServer(PoliteServer):
    accepts_at_once = 1  # all workers share the port

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, link: EngineLink, control: Control
    ) -> None:
        super().__init__(config)
        self._listener, self._link, self._control = listener, link, control

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with signals_ignored():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([self._listener])
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

    async def _close_port(self, sockets: list[socket.socket] | None) -> None:
        await accept_the_last([self._listener])
        await super()._close_port([])
