"""One replica: the application of `halfeven serve` over this node's copy of the store. It writes to the copy only."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

from fastapi import FastAPI
from ray import get_runtime_context
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...models.errors import NotReady
from ..batching.interface import LoadConfig
from ..batching.place import Place
from ..endpoint.endpoint_process import close_all
from ..finetune.web.refused import refuse_training
from ..http.error_mapping import NotOffered
from ..server import application, place_of, rules_of
from ..versions.following import Following
from ..versions.loading.release import one_heap
from ..versions.roster import Roster
from ..versions.store_copy import StoreCopy
from ..versions.traffic.rules import TrialRules
from .one_writer import RemoteWriter
from .options import Options

_OF_ONE_PROCESS = (
    "loading and unloading concern one process, and there may be many replicas: what the store names is loaded; "
    "POST /v1/models/{}/promote or /rollback moves it for all of them"
)
_NO_TRAINING = (
    "replicas do not train: run `halfeven finetune NAME --data FILE --ray APP` as a job of Ray's (`ray job submit`); "
    "what it makes is published in this store"
)


class Replica:
    """The deployment's class. Ray Serve runs the ASGI application that `__serve_build_asgi_app__` gives."""

    async def __init__(self, options: Options, writer: DeploymentHandle) -> None:
        one_heap()
        self._copy = StoreCopy(options.store, options.folder())
        await asyncio.to_thread(self._copy.follow)
        settings = options.server_settings()
        remote = RemoteWriter(writer, self._copy.follow)
        self._roster = _FollowingRoster(self._copy, place_of(settings), rules_of(settings), remote)
        app, front = application(settings, self._roster, dict)
        refuse_training(app, _NO_TRAINING)
        app.router.lifespan_context = self._lifespan
        self._front, self._shutdown_s, self._was_ready = front, settings.shutdown_seconds, False

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _named_by(self._front, get_runtime_context().get_node_id())

    def check_health(self) -> None:
        """Readiness is checked before the first request, and that every version could be copied: another replica may
        have it. Then liveness: a model that cannot be served is no reason to start the replica again, a lost device is.
        Raises NotReady."""
        reasons = [] if self._was_ready else self._roster.not_ready_reasons() or self._copy.faults()
        if (lost := self._roster.lost) is not None or reasons:
            raise NotReady(lost or "; ".join(reasons))
        self._was_ready = True

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        following = Following(self._copy, self._roster)
        self._roster.start()
        await asyncio.to_thread(self._roster.wait)
        following.start()
        yield
        # Ray Serve has waited for the requests under way.
        await asyncio.to_thread(following.stop)
        await self._roster.stop(self._shutdown_s)
        close_all(app.state.endpoints)


class _FollowingRoster(Roster):
    """A roster that the store alone commands."""

    def __init__(self, copy: StoreCopy, place: Place, rules: TrialRules, writer: RemoteWriter) -> None:
        super().__init__(copy.store, place, rules, writer)
        self._copy = copy

    def load(self, name: str, config: LoadConfig | None = None) -> NoReturn:
        raise NotOffered(_OF_ONE_PROCESS.format(name[:128]))

    def unload(self, name: str) -> NoReturn:
        raise NotOffered(_OF_ONE_PROCESS.format(name[:128]))

    def not_ready_reasons(self, reaches: Callable[[str], bool] = lambda _: True) -> list[str]:
        reasons = super().not_ready_reasons(reaches)
        return reasons if reasons or self.all() else self._copy.faults(reaches)


def _named_by(app: ASGIApp, node: str) -> ASGIApp:
    """Every answer names the node that gave it."""
    header = (b"halfeven-node", node[:12].encode())

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await app(scope, receive, send_named)

    return named
