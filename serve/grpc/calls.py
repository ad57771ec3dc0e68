"""Each call of the gRPC service runs the same functions as the HTTP routes, with other messages around them.

A call needs of a key what the HTTP route ``like`` needs, which does the same (`http/route_scopes.py`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeVar

import orjson
from google.protobuf import json_format

from ...models.errors import BadRequest, NotReady, UnknownName
from ...models.version import __version__
from ..batching.interface import Roster
from ..http.caller import answer_or_leave
from ..http.codecs.infer import InferCodec, InferRequest
from ..http.codecs.metadata import server_metadata
from ..http.inference import parameters_of
from ..http.limits.memory_budget import Lease
from ..http.route_scopes import Need, need_of
from ..http.routes.infer import SMALL_JSON, InferFront, log_answer
from ..http.routes.repository import index_of, load_model, unload_model
from ..http.routes.v2 import configuration_of, metadata_of, statistics_of
from ..logs import requests
from .messages import message
from .tensors import (
    FINAL,
    PART_BYTES,
    WANTS_FINAL,
    check_counts,
    fields_of,
    parts_of,
    response_of,
    typed_bytes,
)

_FEW_PARTS = 10_000  # sizes and parameters, which take 10 ms; a request with more is read in a thread
T = TypeVar("T")


class Calls:
    """The unary calls over one front and its roster. Each takes the request and its lease, and gives the response."""

    def __init__(self, front: InferFront, roster: Roster, server_name: str) -> None:
        self._front, self._roster, self._server_name = front, roster, server_name

    async def server_live(self, request: Any, lease: Lease) -> Any:
        return message("ServerLiveResponse")(live=self._roster.lost is None)

    async def server_ready(self, request: Any, lease: Lease) -> Any:
        return message("ServerReadyResponse")(ready=self._roster.ready)

    async def model_ready(self, request: Any, lease: Lease) -> Any:
        ready = False
        with suppress(NotReady, UnknownName):
            self._roster.find(request.name, request.version or None)
            ready = not self._roster.leaving
        return message("ModelReadyResponse")(ready=ready)

    async def server_metadata(self, request: Any, lease: Lease) -> Any:
        return _from_json("ServerMetadataResponse", server_metadata(self._server_name, __version__))

    async def model_metadata(self, request: Any, lease: Lease) -> Any:
        found = metadata_of(self._roster, request.name, request.version or None)
        return _from_json("ModelMetadataResponse", found)

    async def model_config(self, request: Any, lease: Lease) -> Any:
        found = configuration_of(self._roster, request.name, request.version or None)
        return _from_json("ModelConfigResponse", {"config": found})

    async def model_statistics(self, request: Any, lease: Lease) -> Any:
        found = statistics_of(self._roster, request.name or None, request.version or None)
        return _from_json("ModelStatisticsResponse", found)

    async def repository_index(self, request: Any, lease: Lease) -> Any:
        _one_repository(request)
        found = await _to_the_end(index_of, self._roster, request.ready)
        return _from_json("RepositoryIndexResponse", {"models": found})

    async def load(self, request: Any, lease: Lease) -> Any:
        _one_repository(request)
        given = {}
        for key, value in request.parameters.items():
            kind = value.WhichOneof("parameter_choice")
            # Files are refused by their names: their bytes are not handed on.
            given[key] = getattr(value, kind) if kind and kind != "bytes_param" else ""
        body = orjson.dumps({"parameters": given})
        await _to_the_end(load_model, self._roster, request.model_name, body)
        return message("RepositoryModelLoadResponse")()

    async def unload(self, request: Any, lease: Lease) -> Any:
        _one_repository(request)
        await _to_the_end(unload_model, self._roster, request.model_name)
        return message("RepositoryModelUnloadResponse")()

    async def infer(self, request: Any, lease: Lease) -> Any:
        """A thread reads large typed contents, and very many sizes or parameters, and ranks many scores."""
        inference, asked = self._front.inference, (request.model_name, request.model_version or None)
        check_counts(request, inference.find(asked).spec)
        parts = parts_of(request)
        large = not request.raw_input_contents and request.ByteSize() > SMALL_JSON

        def read(codec: InferCodec) -> InferRequest:
            with lease.meanwhile(typed_bytes(request) + parts * PART_BYTES):
                return codec.read_message(*fields_of(request))

        begun = await inference.ask(asked, read, aside=large or parts > _FEW_PARTS)
        answer = await answer_or_leave(begun.future)
        began_ns = perf_counter_ns()
        version, parameters = answer.prepared.version, parameters_of(answer)
        given = begun.codec, begun.request, answer.outputs, version, parameters
        if begun.codec.is_quick_to_write(begun.request, answer.outputs):
            response = response_of(*given)
        else:
            response = await inference.worker_threads.run(response_of, *given)
        begun.written.add(perf_counter_ns() - began_ns)
        if requests.isEnabledFor(logging.INFO):
            log_answer(begun, answer, None)
        return response


async def _to_the_end(work: Callable[..., T], *arguments: Any) -> T:
    """Run the work in a thread and return its result. A thread cannot be cancelled: where the caller cancels the call,
    the call counts in every limit until the thread has ended."""
    done = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait((done,))
        if not done.cancelled():
            done.exception()  # read it, else asyncio warns
        raise


async def streamed(
    messages: AsyncIterator[Any], answer: Callable[[Any], Coroutine[Any, Any, Any]], ahead: int
) -> AsyncGenerator[Any, None]:
    """The answer to each message of a stream, in their order; up to ``ahead`` are computed at once.

    ``answer`` gives a ModelStreamInferResponse and raises nothing but cancellation.
    """
    under_way: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
    room = asyncio.Semaphore(ahead)

    async def read() -> None:
        try:
            async for one in messages:
                await room.acquire()
                under_way.put_nowait(asyncio.get_running_loop().create_task(answer(one)))
        finally:
            under_way.put_nowait(None)

    reader = asyncio.get_running_loop().create_task(read())
    try:
        while (task := await under_way.get()) is not None:
            yield await task
            room.release()
        await reader  # for its error
    finally:
        reader.cancel()
        while not under_way.empty():
            if (task := under_way.get_nowait()) is not None:
                task.cancel()


def stream_response(request: Any, response: Any) -> Any:
    """The stream's message around an answer. A client that asked for a final mark finds it in the parameters."""
    if WANTS_FINAL in request.parameters:
        response.parameters[FINAL].bool_param = True
    return message("ModelStreamInferResponse")(infer_response=response)


def stream_error(request: Any, words: str) -> Any:
    """The stream's message for a request that is refused; the stream goes on."""
    response = message("ModelInferResponse")(model_name=request.model_name, id=request.id)
    return message("ModelStreamInferResponse")(error_message=words, infer_response=response)


def _from_json(name: str, fields: dict[str, Any]) -> Any:
    """A message from the JSON that HTTP sends; what only the JSON has is left out."""
    return json_format.ParseDict(fields, message(name)(), ignore_unknown_fields=True)


def _one_repository(request: Any) -> None:
    if request.repository_name:
        raise BadRequest(
            f"repository_name = '{request.repository_name[:80]}': named repositories are not offered; leave it empty"
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the HTTP route that does the same, and the field of the request that names the model."""

    name: str
    like: tuple[str, str]
    answer: Callable[[Calls, Any, Lease], Awaitable[Any]]
    model: str = "name"
    streams: bool = False

    @property
    def request(self) -> Any:
        """The class of its message."""
        return message("ModelInferRequest" if self.streams else f"{self.name}Request")

    @property
    def response(self) -> Any:
        return message(f"{self.name}Response")

    @property
    def is_open(self) -> bool:
        """True if the call needs no key."""
        return not need_of(*self.like)[0]

    def need(self, request: Any) -> Need:
        """The scopes (a key needs one of them) and the model of this request."""
        scopes, model = need_of(*self.like)
        # No name, which statistics take for all models, is in no key's list.
        return scopes, getattr(request, self.model) if model == "m" else model


_INFER, _REPOSITORY = ("POST", "/v2/models/m/infer"), "/v2/repository/models/m"
CALLS = {
    call.name: call
    for call in (
        Call("ServerLive", ("GET", "/v2/health/live"), Calls.server_live),
        Call("ServerReady", ("GET", "/v2/health/ready"), Calls.server_ready),
        Call("ModelReady", ("GET", "/v2/models/m/ready"), Calls.model_ready),
        Call("ServerMetadata", ("GET", "/v2"), Calls.server_metadata),
        Call("ModelMetadata", ("GET", "/v2/models/m"), Calls.model_metadata),
        Call("ModelConfig", ("GET", "/v2/models/m/config"), Calls.model_config),
        Call("ModelStatistics", ("GET", "/v2/models/m/stats"), Calls.model_statistics),
        Call("ModelInfer", _INFER, Calls.infer, "model_name"),
        Call("ModelStreamInfer", _INFER, Calls.infer, "model_name", streams=True),
        Call("RepositoryIndex", ("POST", "/v2/repository/index"), Calls.repository_index),
        Call("RepositoryModelLoad", ("POST", f"{_REPOSITORY}/load"), Calls.load, "model_name"),
        Call("RepositoryModelUnload", ("POST", f"{_REPOSITORY}/unload"), Calls.unload, "model_name"),
    )
}
# Calls of Triton's that are not offered: the HTTP routes that refuse the same, with the way out.
NOT_OFFERED = {
    **{
        f"{kind}SharedMemory{verb}": (
            ("POST", f"/v2/{kind.lower()}sharedmemory/status"),
            "shared memory is not offered: send the tensors in the message",
        )
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    },
    "TraceSetting": (("POST", "/v2/trace/setting"), "the trace extension is not offered"),
    "LogSettings": (
        ("POST", "/v2/logging"),
        "the logging extension is not offered: the log level is an option",
    ),
}
