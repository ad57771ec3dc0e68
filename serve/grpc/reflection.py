"""gRPC server reflection: grpcurl, grpcui, Postman and Envoy learn the services without a file of ours.

A caller needs what ``/openapi.json`` needs: any key of this server, where it has keys. Both versions of the protocol
have the same messages. Source: "GRPC Server Reflection Protocol", grpc/reflection/v1/reflection.proto.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import cache
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...models.errors import HalfevenError
from .call_end import abort
from .messages import files, message, pool, unreadable

_PACKAGES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_SERVICE, _METHOD = "ServerReflection", "ServerReflectionInfo"
_NOT_FOUND, _UNIMPLEMENTED = 5, 12  # numbers of gRPC's statuses
_LONGEST = 200  # characters of a name that an error repeats


@cache
def _classes() -> tuple[Any, Any]:
    """The classes of a request and a response."""
    return message(f"{_SERVICE}Request", _PACKAGES[0]), message(f"{_SERVICE}Response", _PACKAGES[0])


def _file_of(symbol: str) -> Any:
    """The file of a message, enum, service or method. Raises KeyError."""
    try:
        return pool().FindFileContainingSymbol(symbol)
    except KeyError:  # it does not look for methods
        return pool().FindMethodByName(symbol).containing_service.file


def answer(request: Any) -> Any:
    """The response to one request of the protocol."""
    response = _classes()[1](valid_host=request.host, original_request=request)
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
    """``admit`` raises for the metadata of a caller who may not ask; ``seconds``: within which each request comes."""

    def __init__(self, admit: Callable[[Any], None], seconds: float) -> None:
        self._admit, self._seconds = admit, seconds

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method not in [f"/{package}.{_SERVICE}/{_METHOD}" for package in _PACKAGES]:
            return None
        request, response = _classes()
        metadata = handler_call_details.invocation_metadata

        async def answers(messages: AsyncIterator[Any], context: Any) -> None:
            try:
                self._admit(metadata)
            except HalfevenError as error:
                await abort(context, error)
            await self._answer_all(messages, context)

        return grpc.stream_stream_rpc_method_handler(answers, request.FromString, response.SerializeToString)  # type: ignore[arg-type]

    async def _answer_all(self, messages: AsyncIterator[Any], context: Any) -> None:
        asked = aiter(messages)
        try:
            while True:
                async with asyncio.timeout(self._seconds):
                    request = await anext(asked)
                await context.write(answer(request))
        except (StopAsyncIteration, TimeoutError):  # an idle stream ends: a new one costs little
            return
        except DecodeError:
            await abort(context, unreadable(_METHOD))
