"""The infer route in a worker: reads and writes here, asks the engine process, and hands over everything else.

A request that cannot be read with the spec that is known here is not refused here: the spec may be old. The engine
process reads it again, and refuses or answers it. So a worker alone refuses only what does not depend on a model: keys,
foreign pages, sizes and times.
"""

import asyncio
from collections.abc import MutableMapping
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

from starlette.types import Message, Receive, Scope, Send

from ...models.errors import BadInput, TooLarge
from ..batching.counters import Phase
from ..batching.interface import Answer, Answering
from ..http.codecs.infer import InferCodec, InferRequest
from ..http.error_mapping import EngineAway, Reaches, no_model
from ..http.limits.memory_budget import Lease
from ..http.routes.infer import Begun, Headers, Ids, InferFront, asked_of
from ..logs import requests
from .engine_app import BROKEN_OFF, Collected, EngineApp
from .engine_link import AnsweredByEngine, EngineLink, RemoteModel

_UNREAD = InferRequest(None, [], 0, ())
# Of an answer's headers, what is written here.
_OF_THIS_CONNECTION = frozenset(
    (b"content-length", b"connection", b"transfer-encoding", b"date", b"x-request-id", b"triton-request-id")
)


class WorkerFront(InferFront):
    """An `InferFront` over an `EngineLink`; ``app`` is the engine process's application."""

    def __init__(self, app: EngineApp, link: EngineLink, *arguments: Any) -> None:
        super().__init__(app, link, *arguments)
        self._engine, self._link = app, link
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_for_engine(scope):
            if scope["path"] == "/metrics":
                self._link.flush()
            await self._engine(scope, receive, self._with_retry(scope, send))
        else:
            await super().__call__(scope, receive, send)

    def _is_for_engine(self, scope: Scope) -> bool:
        """Everything but requests to the infer route of a model that is known here. The load of the server, which some
        of them ask for, is known in the engine process alone."""
        asked = asked_of(scope["path"].removeprefix(scope.get("root_path", "")))
        if asked is None or scope["method"] != "POST" or not self._link.knows(asked[0]):
            return True
        return any(name == b"endpoint-load-metrics-format" for name, _ in scope["headers"])

    def _with_retry(self, scope: Scope, send: Send) -> Send:
        """While the models are being made ready, say when to ask again: the caller may have had answers before."""
        if not self._link.starting or asked_of(scope["path"]) is None:
            return send

        async def with_retry(message: Message) -> None:
            if message.get("status") == 503 and not _has(message["headers"], b"retry-after"):
                message["headers"] = [*message["headers"], (b"retry-after", b"1")]
            await send(message)

        return with_retry

    def begin(
        self,
        served: Answering,
        header_length: str | None,
        body: bytes,
        authorization: str | None = None,
        ids: Ids = (),
    ) -> Begun:
        """As `InferFront.begin`; a refusal comes with the future."""
        since_ns, received = perf_counter_ns(), _Received(header_length, body, authorization, ids)
        codec = self.codec(served)
        try:
            request = codec.read(body, header_length)
        except BadInput:
            return self._read_there(served, codec, since_ns, received)
        return self._asked(served, codec, request, since_ns, received)

    async def _begin_elsewhere(
        self,
        asked: tuple[str, str | None],
        served: Answering,
        header_length: str | None,
        body: bytes,
        lease: Lease,
        authorization: str | None = None,
        ids: Ids = (),
    ) -> Begun:
        since_ns, received = perf_counter_ns(), _Received(header_length, body, authorization, ids)
        codec = self.codec(served)
        try:
            request = await self.read_elsewhere(codec, header_length, body, lease)
        except TooLarge:  # whatever the model's spec is
            raise
        except BadInput:
            return self._read_there(served, codec, since_ns, received)
        return self._asked(served, codec, request, since_ns, received)

    def refusal(
        self, error: Exception, request_id: str | None = None, model: str = "", reaches: Reaches = no_model
    ) -> tuple[int, Headers, bytes]:
        if not isinstance(error, AnsweredByEngine):
            return super().refusal(error, request_id, model, reaches)
        if not error.logged:
            named = {"request_id": request_id, "model": model[:128], "status": error.status}
            requests.info("refused: %s", error.body.decode(errors="replace"), extra=named)
        return error.status, list(error.headers), error.body

    def _asked(
        self,
        served: Answering,
        codec: InferCodec,
        request: InferRequest,
        since_ns: int,
        received: "_Received",
    ) -> Begun:
        model = cast(RemoteModel, served)
        future = model.ask(
            request.arrays,
            request.rows,
            request.terms,
            received.authorization,
            lambda: self._whole(model, received),
        )
        return Begun(codec, request, future, since_ns, self.written[model.name])

    def _read_there(
        self, served: Answering, codec: InferCodec, since_ns: int, received: "_Received"
    ) -> Begun:
        future = self._whole(cast(RemoteModel, served), received)
        return Begun(codec, _UNREAD, future, since_ns, Phase())  # the answer is not written here

    def _whole(self, model: RemoteModel, received: "_Received") -> asyncio.Future[Answer]:
        """Have the engine process answer the whole request, and log it; the answer comes as AnsweredByEngine."""
        task = asyncio.get_running_loop().create_task(self._call(_scope(model, received), received.body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _call(self, scope: Scope, body: bytes) -> Answer:
        collected = Collected(body)
        await self._engine.ask(scope, collected.receive, self._with_retry(scope, collected.send))
        if not collected.whole:
            raise EngineAway(BROKEN_OFF)
        headers = [item for item in collected.headers if item[0] not in _OF_THIS_CONNECTION]
        raise AnsweredByEngine(collected.status, headers, collected.body, logged=True)


class _Received(NamedTuple):
    """The body of a request, and those of its headers that the engine process needs to answer it."""

    header_length: str | None
    body: bytes
    authorization: str | None
    ids: Ids


def _scope(model: RemoteModel, received: _Received) -> MutableMapping[str, Any]:
    version = "" if model.version is None else f"/versions/{model.version}"
    headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(received.body)), *received.ids]
    if received.header_length is not None:
        headers.append((b"inference-header-content-length", received.header_length.encode("latin-1")))
    if received.authorization is not None:
        headers.append((b"authorization", received.authorization.encode("latin-1")))
    path = f"/v2/models/{model.name}{version}/infer"
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "http_version": "1.1", "scheme": "http", "headers": headers,
    }  # fmt: skip


def _has(headers: Any, name: bytes) -> bool:
    return any(key.lower() == name for key, _ in headers)
