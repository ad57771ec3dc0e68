"""gRPC's own services: whether the server is ready, and what services it has.

- ``grpc.health.v1.Health``: what Kubernetes and load balancers ask. It needs no key, so few of its messages are read at
  once. `Check` answers once; `Watch` goes on answering at each change, also for a name that is not known, for which
  `Check` is NOT_FOUND. Source: "GRPC Health Checking Protocol".
- Reflection: grpcurl, grpcui, Postman and Envoy learn the services without a file of ours. A caller needs what
  ``/openapi.json`` needs: any key of this server, where it has keys. Both versions of the protocol have the same
  messages. Source: "GRPC Server Reflection Protocol", grpc/reflection/v1/reflection.proto.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...models.errors import BadRequest, HalfevenError, NotReady, UnknownName
from ..batching.interface import Roster
from ..http.limits.connections import Connections
from ..http.limits.memory_budget import MemoryBudget
from .call_end import abort
from .messages import FEW_BYTES, SERVICE, files, message, only_message, pool, unreadable
from .open_stream import KeylessCalls, OpenStream, UnreadAnswers, in_place, most_watchers

_PACKAGE = "grpc.health.v1"
HEALTH = f"{_PACKAGE}.Health"
LOOK_EVERY_S = 0.25  # seconds from a change until its watchers are sent it, at most
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_PACKAGES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_SERVICE, _METHOD = "ServerReflection", "ServerReflectionInfo"
_NOT_FOUND, _UNIMPLEMENTED = 5, 12  # numbers of gRPC's statuses
_LONGEST = 200  # characters of a name that an error repeats
_MOST_READ = 2  # messages of `Check` that are on their way at once, and of `Watch`: gRPC takes each whole


def _read(data: bytes, kind: Any, expected: str) -> Any:
    """The message of these bytes. Raises BadRequest where they are too many: a watch keeps its name, and an answer of
    reflection repeats its request."""
    if (size := len(data)) > FEW_BYTES:
        # The error keeps this call's variables for a while.
        del data
        raise BadRequest(f"the message has {size} bytes, expected {expected}")
    return kind.FromString(data)


class HealthService(grpc.GenericRpcHandler):
    """Answers whether the server is ready, for the empty name and for the name of the V2 service."""

    def __init__(self, roster: Roster, seconds: float, calls: int, keyless: KeylessCalls) -> None:
        """``seconds``: within which a call's message must arrive. ``calls``: all calls of the server at once."""
        self._roster, self._seconds, self._keyless = roster, seconds, keyless
        watchers = most_watchers(calls)
        self._watchers = Connections(watchers)
        self._free = min(max(watchers // 2, 1), _MOST_READ)  # messages of `Check` that may still be read
        self._watches_read = asyncio.Semaphore(_MOST_READ)
        self._ending = False

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        expected = f"the name of a service; send '' or '{SERVICE}'"
        read = partial(_read, kind=message("HealthCheckRequest", _PACKAGE), expected=expected)
        write = message("HealthCheckResponse", _PACKAGE).SerializeToString
        if handler_call_details.method == f"/{HEALTH}/Check":
            return grpc.stream_unary_rpc_method_handler(self._check, read, write)  # type: ignore[arg-type]
        if handler_call_details.method == f"/{HEALTH}/Watch":
            return grpc.stream_stream_rpc_method_handler(self._watch, read, write)  # type: ignore[arg-type]
        return None

    def end_watches(self) -> None:
        """Send each watcher its last status and end its call: open calls would delay the end of the server."""
        self._ending = True

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE):
            return _SERVICE_UNKNOWN
        return _SERVING if self._roster.ready else _NOT_SERVING

    async def _check(self, messages: AsyncIterator[Any], context: Any) -> Any:
        try:
            self._keyless.enter(context)
            if (status := self._status(await self._checked(messages))) == _SERVICE_UNKNOWN:
                raise UnknownName(f"ask for the service '' or '{SERVICE}'; models have ModelReady")
        except HalfevenError as error:
            await abort(context, error)
        return message("HealthCheckResponse", _PACKAGE)(status=status)

    async def _checked(self, messages: AsyncIterator[Any]) -> str:
        """The service that a `Check` names. Where enough messages are on their way, it is the whole server: a call that
        waits for its turn would take the place of another call, and a probe wants its answer at once."""
        if not self._free:
            return ""
        self._free -= 1
        try:
            return (await only_message(messages, self._seconds, "Check")).service
        finally:
            self._free += 1

    async def _watch(self, messages: AsyncIterator[Any], context: Any) -> None:
        async with in_place(self._watchers, context, "Check"):
            self._keyless.enter(context)
            async with self._watches_read:
                asked = await only_message(messages, self._seconds, "Watch")
            await self._follow(asked.service, context)

    async def _follow(self, service: str, context: Any) -> None:
        """Send the status now and after each change. Raises NotReady where the server ends."""
        sent = None
        while True:
            if (status := self._status(service)) != sent:
                await context.write(message("HealthCheckResponse", _PACKAGE)(status=status))
                sent = status
            elif self._ending:
                raise NotReady("the server has shut down; watch another one")
            # Readiness has many causes, a lost device among them, and none of them calls back.
            await asyncio.sleep(LOOK_EVERY_S)


def _file_of(symbol: str) -> Any:
    """The file of a message, enum, service or method. Raises KeyError."""
    try:
        return pool().FindFileContainingSymbol(symbol)
    except KeyError:  # it does not look for methods
        return pool().FindMethodByName(symbol).containing_service.file


def answer(request: Any) -> Any:
    """The response to one request of the protocol."""
    response = message(f"{_SERVICE}Response", _PACKAGES[0])(valid_host=request.host, original_request=request)
    kind = request.WhichOneof("message_request")
    asked = getattr(request, kind) if kind else ""
    if kind == "list_services":
        for file in files():
            for service in file.service:
                response.list_services_response.service.add(name=f"{file.package}.{service.name}")
        return response
    file = None
    with suppress(KeyError):
        if kind == "file_by_filename":
            file = pool().FindFileByName(asked)
        elif kind in ("file_containing_symbol", "all_extension_numbers_of_type"):
            file = _file_of(asked)
    if file is None:
        known = kind is not None
        response.error_response.error_code = _NOT_FOUND if known else _UNIMPLEMENTED
        what = (
            f"nothing is called {str(asked)[:_LONGEST]!r} here" if known else "the request asks for nothing"
        )
        response.error_response.error_message = what
    elif kind == "all_extension_numbers_of_type":  # none of ours has extensions
        response.all_extension_numbers_response.base_type_name = asked
    else:
        response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
    return response


class ReflectionService(grpc.GenericRpcHandler):
    """``admit`` raises for the metadata of a caller who may not ask; ``seconds``: within which each request comes.
    ``streams``: all streams of the server, of which a call is one."""

    def __init__(
        self, admit: Callable[[Any], None], seconds: float, streams: Connections, budget: MemoryBudget
    ) -> None:
        self._admit, self._seconds, self._streams, self._budget = admit, seconds, streams, budget

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method not in [f"/{package}.{_SERVICE}/{_METHOD}" for package in _PACKAGES]:
            return None
        metadata = handler_call_details.invocation_metadata

        async def answers(messages: AsyncIterator[Any], context: Any) -> None:
            try:
                self._admit(metadata)
            except HalfevenError as error:
                await abort(context, error)
            async with in_place(self._streams, context, "a .proto file") as place:
                await self._answer_all(messages, context, place)

        read = partial(_read, kind=message(f"{_SERVICE}Request", _PACKAGES[0]), expected="a name")
        write = message(f"{_SERVICE}Response", _PACKAGES[0]).SerializeToString
        return grpc.stream_stream_rpc_method_handler(answers, read, write)  # type: ignore[arg-type]

    async def _answer_all(self, messages: AsyncIterator[Any], context: Any, place: OpenStream) -> None:
        asked, unread = aiter(messages), UnreadAnswers(self._budget)
        try:
            while True:
                async with asyncio.timeout(self._seconds):
                    request = await anext(asked)
                place.asked()
                await unread.write(context, unread.counted(answer(request)))
                place.answered()
        except (StopAsyncIteration, TimeoutError):  # an idle stream ends: a new one costs little
            return
        except DecodeError:
            raise unreadable(_METHOD) from None
        finally:
            unread.close()
