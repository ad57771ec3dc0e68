"""The engine process: everything of a server but HTTP connections. Workers ask it over channels."""

import asyncio
import logging
import socket
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from prometheus_client.registry import Collector

from ...models.store import Store
from ..access.access_control import AccessControl
from ..http.connection.polite_server import Beside, PoliteServer
from ..http.limits.bounds import Bounds
from ..http.routes.infer import InferFront
from ..server import Notify, build, convert_all, grpc_beside, http_config, notify_active
from ..settings import Settings
from ..versions.loading.release import one_heap
from ..versions.roster import Roster
from .control import Control, Said, connection_of, signals_ignored
from .engine_side import EngineSide
from .worker_gauges import WorkerGauges

_LOG = logging.getLogger("halfeven")


def run_engine(
    settings: Settings,
    store: Store,
    control: Control,
    bounds: Bounds,
    needs_keys: bool,
    start: int,
    notify: Notify,
) -> None:
    """Run the models until the parent ends it. ``start``: how often an engine process was started, with this one.

    Raises what `server.build` and `server.convert_all` do.
    """
    certificates = settings.certificates
    one_heap()
    if settings.models is not None and start == 1:
        convert_all(settings.models, store, notify)
    gauges = WorkerGauges(start)
    collectors: Sequence[Collector] = (gauges,)
    access = AccessControl(settings.keys, needs_keys, patient=start > 1)
    front, roster = build(settings, store, bounds, access, collectors)
    beside = grpc_beside(settings, front, roster, certificates)
    _EngineServer(http_config(settings, front, None), front, roster, control, gauges, notify, beside).run()


class _EngineServer(PoliteServer):
    """A server without a port: its connections are channels."""

    def __init__(
        self,
        config: uvicorn.Config,
        front: InferFront,
        roster: Roster,
        control: Control,
        gauges: WorkerGauges,
        notify: Notify,
        beside: Beside | None,
    ) -> None:
        super().__init__(config, on_leaving=roster.leave, beside=beside)
        self._front, self._roster, self._control, self._gauges = front, roster, control, gauges
        self._notify = notify
        self._starting = True
        self._sides: dict[EngineSide, int] = {}

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with signals_ignored():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if not self.started:
            return
        if self.beside is not None:
            self._notify(f"halfeven listens for gRPC on {self.config.host}:{self.beside.port}")
        self._control.listen(self._hear)
        self._control.send(up=True)
        asyncio.get_running_loop().run_in_executor(None, self._wait_for_models)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown([])
        for side in list(self._sides):
            side.close()

    def _hear(self, said: Said, descriptors: list[int]) -> None:
        if "connect" in said:
            self._connect(said["pid"], descriptors)
        elif "leave" in said:
            self._roster.leave()
        elif "hurry" in said:
            self._hurried = True
        elif "end" in said:
            self.should_exit = True
        self._gauges.pids = list(self._sides.values())

    def _connect(self, pid: int, descriptors: list[int]) -> None:
        try:
            connection = connection_of(descriptors)
            side = EngineSide(
                self._front, self._roster, *connection, lambda: self._starting, self._run, self._gone
            )
        except OSError as error:  # the worker loses its end, and asks for another one
            _LOG.error("an HTTP worker cannot be connected now: %s", error)
        else:
            self._sides[side] = pid

    def _gone(self, side: EngineSide) -> None:
        self._sides.pop(side, None)
        self._gauges.pids = list(self._sides.values())

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        """A call counts as a request under way when the server ends."""
        task = asyncio.get_running_loop().create_task(call)
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def _wait_for_models(self) -> None:
        notify_active(self._roster, self._notify)
        self._starting = False
