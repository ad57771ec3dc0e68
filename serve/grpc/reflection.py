"""gRPC server reflection: grpcurl, grpcui, Postman and Envoy learn the services without a file of ours.

A caller needs what ``/openapi.json`` needs: any key of this server, where it has keys. Both versions of the protocol
have the same messages. Source: "GRPC Server Reflection Protocol", grpc/reflection/v1/reflection.proto.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ...models.errors import HalfevenError
from .call_end import abort
from .health import health_file
from .messages import COMPILED, unreadable

File = descriptor_pb2.FileDescriptorProto
_PACKAGES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_SERVICE, _METHOD = "ServerReflection", "ServerReflectionInfo"
_INT32, _STRING, _MESSAGE, _BYTES = 5, 9, 11, 12  # FieldDescriptorProto.Type
_ONE, _MANY = 1, 3  # FieldDescriptorProto.Label
_NOT_FOUND, _UNIMPLEMENTED = 5, 12  # numbers of gRPC's statuses
_LONGEST = 200  # characters of a name that an error repeats
# Each message: the fields as (name, number, type, label, message); those after "|" are of a oneof.
_MESSAGES: dict[str, tuple[Any, ...]] = {
    "ServerReflectionRequest": (
        ("host", 1, _STRING), "|", ("file_by_filename", 3, _STRING), ("file_containing_symbol", 4, _STRING),
        ("file_containing_extension", 5, _MESSAGE, _ONE, "ExtensionRequest"),
        ("all_extension_numbers_of_type", 6, _STRING), ("list_services", 7, _STRING),
    ),
    "ExtensionRequest": (("containing_type", 1, _STRING), ("extension_number", 2, _INT32)),
    "ServerReflectionResponse": (
        ("valid_host", 1, _STRING), ("original_request", 2, _MESSAGE, _ONE, "ServerReflectionRequest"), "|",
        ("file_descriptor_response", 4, _MESSAGE, _ONE, "FileDescriptorResponse"),
        ("all_extension_numbers_response", 5, _MESSAGE, _ONE, "ExtensionNumberResponse"),
        ("list_services_response", 6, _MESSAGE, _ONE, "ListServiceResponse"),
        ("error_response", 7, _MESSAGE, _ONE, "ErrorResponse"),
    ),
    "FileDescriptorResponse": (("file_descriptor_proto", 1, _BYTES, _MANY),),
    "ExtensionNumberResponse": (("base_type_name", 1, _STRING), ("extension_number", 2, _INT32, _MANY)),
    "ListServiceResponse": (("service", 1, _MESSAGE, _MANY, "ServiceResponse"),),
    "ServiceResponse": (("name", 1, _STRING),),
    "ErrorResponse": (("error_code", 1, _INT32), ("error_message", 2, _STRING)),
}  # fmt: skip


def _file(package: str) -> File:
    """The protocol's own file, in one of its versions."""
    file = File(name=f"{package.replace('.', '/')}/reflection.proto", package=package, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message, chosen = file.message_type.add(name=name), False
        for field in fields:
            if field == "|":
                message.oneof_decl.add(
                    name="message_request" if name.endswith("Request") else "message_response"
                )
                chosen = True
                continue
            called, number, kind, label, of = (*field, *(_ONE, "")[len(field) - 3 :])
            added = message.field.add(name=called, number=number, type=kind, label=label)
            if of:
                added.type_name = f".{package}.{of}"
            if chosen:
                added.oneof_index = 0
    service = file.service.add(name=_SERVICE)
    service.method.add(
        name=_METHOD,
        input_type=f".{package}.ServerReflectionRequest",
        output_type=f".{package}.ServerReflectionResponse",
        client_streaming=True,
        server_streaming=True,
    )
    return file


@cache
def _classes() -> tuple[Any, Any]:
    """The classes of a request and a response."""
    pool, file = descriptor_pool.DescriptorPool(), _file(_PACKAGES[0])
    pool.Add(file)
    names = ("ServerReflectionRequest", "ServerReflectionResponse")
    first, second = (pool.FindMessageTypeByName(f"{_PACKAGES[0]}.{name}") for name in names)
    return message_factory.GetMessageClass(first), message_factory.GetMessageClass(second)


@cache
def _files() -> Sequence[File]:
    ours = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
    return (*ours, health_file(), *map(_file, _PACKAGES))


@cache
def _by_symbol() -> dict[str, File]:
    """The file of each message, enum, service and method."""
    return {name: file for file in _files() for name in _symbols(file)}


def _symbols(file: File) -> Iterator[str]:
    def inside(prefix: str, message: Any) -> Iterator[str]:
        yield (name := f"{prefix}.{message.name}")
        yield from (f"{name}.{enum.name}" for enum in message.enum_type)
        for nested in message.nested_type:
            yield from inside(name, nested)

    for message in file.message_type:
        yield from inside(file.package, message)
    yield from (f"{file.package}.{enum.name}" for enum in file.enum_type)
    for service in file.service:
        yield (name := f"{file.package}.{service.name}")
        yield from (f"{name}.{method.name}" for method in service.method)


def answer(request: Any) -> Any:
    """The response to one request of the protocol."""
    response = _classes()[1](valid_host=request.host, original_request=request)
    kind = request.WhichOneof("message_request")
    asked = getattr(request, kind) if kind else ""
    if kind == "list_services":
        for file in _files():
            for service in file.service:
                response.list_services_response.service.add(name=f"{file.package}.{service.name}")
        return response
    file = None
    if kind == "file_by_filename":
        file = next((one for one in _files() if one.name == asked), None)
    elif kind in ("file_containing_symbol", "all_extension_numbers_of_type"):
        file = _by_symbol().get(asked)
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
        response.file_descriptor_response.file_descriptor_proto.append(file.SerializeToString())
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
