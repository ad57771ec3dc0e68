"""``grpc.health.v1.Health``: what Kubernetes and load balancers ask over gRPC. It needs no key.

`Check` answers once; `Watch` goes on answering at each change, also for a name that is not known, for which `Check` is
NOT_FOUND. Source: "GRPC Health Checking Protocol".
"""

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import grpc

from ...models.errors import HalfevenError, NotReady, UnknownName
from ..batching.interface import Roster
from ..http.limits.connections import Connections
from .call_end import abort
from .messages import SERVICE, message, only_message
from .open_stream import OpenStream, ended, no_place

_PACKAGE = "grpc.health.v1"
HEALTH = f"{_PACKAGE}.Health"
LOOK_EVERY_S = 0.25  # seconds from a change until its watchers are sent it, at most
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


@cache
def _messages() -> tuple[Any, Any]:
    """The classes of HealthCheckRequest and HealthCheckResponse."""
    return message("HealthCheckRequest", _PACKAGE), message("HealthCheckResponse", _PACKAGE)


class HealthService(grpc.GenericRpcHandler):
    """Answers whether the server is ready, for the empty name and for the name of the V2 service."""

    def __init__(self, roster: Roster, seconds: float, most_watchers: int) -> None:
        """``seconds``: within which a call's message must arrive. ``most_watchers``: calls of `Watch` at once."""
        self._roster, self._seconds = roster, seconds
        self._watchers = Connections(most_watchers)
        self._ending = False

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        request, response = _messages()
        read, write = request.FromString, response.SerializeToString
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
            asked = await only_message(messages, self._seconds, "Check")
            if (status := self._status(asked.service)) == _SERVICE_UNKNOWN:
                raise UnknownName(f"ask for the service '' or '{SERVICE}'; models have ModelReady")
        except HalfevenError as error:
            await abort(context, error)
        return _messages()[1](status=status)

    async def _watch(self, messages: AsyncIterator[Any], context: Any) -> None:
        place = OpenStream()
        if not self._watchers.enter(place):
            await abort(context, no_place("Check"))
        try:
            asked = await only_message(messages, self._seconds, "Watch")
            await self._follow(asked.service, context)
        except asyncio.CancelledError:
            if not place.was_closed():
                raise
            await abort(context, ended())
        except HalfevenError as error:
            await abort(context, error)
        finally:
            self._watchers.leave(place)

    async def _follow(self, service: str, context: Any) -> None:
        """Send the status now and after each change. Raises NotReady where the server ends."""
        sent = None
        while True:
            if (status := self._status(service)) != sent:
                await context.write(_messages()[1](status=status))
                sent = status
            elif self._ending:
                raise NotReady("the server has shut down; watch another one")
            # Readiness has many causes, a lost device among them, and none of them calls back.
            await asyncio.sleep(LOOK_EVERY_S)
