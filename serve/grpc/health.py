"""``grpc.health.v1.Health/Check``: what Kubernetes and load balancers ask over gRPC. It needs no key.

`Watch` is not offered: the protocol has clients then go on without it. Source: "GRPC Health Checking Protocol".
"""

from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ...models.errors import BadInput
from ..batching.interface import Roster
from ..http.error_mapping import grpc_status_of
from .messages import SERVICE, only_message

_PACKAGE = "grpc.health.v1"
HEALTH = f"{_PACKAGE}.Health"
_SERVING, _NOT_SERVING = 1, 2
_STRING, _ENUM, _OPTIONAL = 9, 14, 1  # FieldDescriptorProto.Type and Label


@cache
def _messages() -> tuple[Any, Any]:
    """The classes of HealthCheckRequest and HealthCheckResponse, in a pool of their own."""
    file = descriptor_pb2.FileDescriptorProto(name="health.proto", package=_PACKAGE, syntax="proto3")
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=_STRING, label=_OPTIONAL)
    response = file.message_type.add(name="HealthCheckResponse")
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        status.value.add(name=name, number=number)
    response.field.add(
        name="status",
        number=1,
        type=_ENUM,
        label=_OPTIONAL,
        type_name=f".{_PACKAGE}.HealthCheckResponse.ServingStatus",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{one.name}") for one in (request, response))
    first, second = (message_factory.GetMessageClass(one) for one in found)
    return first, second


class HealthService(grpc.GenericRpcHandler):
    """Answers whether the server is ready, for the empty name and for the name of the V2 service."""

    def __init__(self, roster: Roster, seconds: float) -> None:
        """``seconds``: within which a call's message must arrive."""
        self._roster, self._seconds = roster, seconds

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != f"/{HEALTH}/Check":
            return None
        request, response = _messages()

        async def check(messages: AsyncIterator[Any], context: Any) -> Any:
            try:
                asked = await only_message(messages, self._seconds, "Check")
            except BadInput as error:
                await context.abort(grpc.StatusCode[grpc_status_of(error)], str(error))
                raise  # for the type checker: abort has raised
            if asked.service not in ("", SERVICE):
                await context.abort(
                    grpc.StatusCode.NOT_FOUND,
                    f"ask for the service '' or '{SERVICE}'; models have ModelReady",
                )
            return response(status=_SERVING if self._roster.ready else _NOT_SERVING)

        return grpc.stream_unary_rpc_method_handler(check, request.FromString, response.SerializeToString)  # type: ignore[arg-type]
