"""The gRPC server beside the HTTP one: the same loop, batcher, keys, limits and error mapping.

A call's key is asked for when its headers are here, before its message is read; then, with the model that the message
names, it is admitted with the key's limits.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ...models.errors import BadSetting, Forbidden, HalfevenError, Unauthenticated
from ..access.certificates import Certificates
from ..address import address
from ..batching.interface import Roster
from ..http.error_mapping import NotOffered
from ..http.limits.connections import Connections
from ..http.limits.memory_budget import FREE_BYTES
from ..http.limits.request_limits import DEFAULTS, RequestLimits
from ..http.route_scopes import need_of
from ..http.routes.infer import InferFront
from .call_end import abort, add_load, load_format, words_of
from .calls import CALLS, NOT_OFFERED, Call, Calls, stream_error, stream_response, streamed
from .health_and_reflection import HEALTH, HealthService, ReflectionService
from .messages import SERVICE, check_parts, only_message, unreadable
from .open_stream import KeylessCalls, UnreadAnswers, in_place, most_streams

AHEAD = DEFAULTS.requests_ahead  # requests of one stream that are under way at once
# A connection that is silent for 60 s is asked whether its client is there, who has 20 s to answer.
_WATCH_S, _GONE_S = 60, 20
_LARGEST = 2**31 - 1  # that gRPC takes as an option
_LOG = logging.getLogger(__name__)


class GrpcServer:
    """Started and stopped in the event loop of the HTTP server. ``port`` is the real one after `start`."""

    def __init__(
        self,
        front: InferFront,
        roster: Roster,
        host: str,
        port: int,
        server_name: str = "halfeven",
        certificates: Certificates | None = None,
        limits: RequestLimits = DEFAULTS,
    ) -> None:
        self.host, self.port, self._limits = host, port, limits
        self._front, self._certificates = front, certificates
        limit = front.bounds.connections.limit
        keyless = KeylessCalls(limit)
        streams = Connections(most_streams(limit))
        calls = _Service(front, Calls(front, roster, server_name), keyless, streams)
        self._health = HealthService(roster, front.body_timeout_s, limit, keyless)
        reflection = ReflectionService(
            partial(_admit_reader, front), front.body_timeout_s, streams, front.bounds.budget
        )
        self._services = (reflection, calls, self._health)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Raises BadSetting where the address cannot be had."""
        limit = self._front.bounds.connections.limit
        self._server = server = grpc.aio.server(
            options=self._options(limit),
            maximum_concurrent_rpcs=limit,
        )
        server.add_generic_rpc_handlers(self._services)
        wanted = address(self.host, self.port)
        try:
            if self._certificates is None:
                self.port = server.add_insecure_port(wanted)
            else:
                self.port = server.add_secure_port(wanted, _credentials(self._certificates))
        except RuntimeError:
            raise BadSetting(
                f"cannot listen for gRPC on {wanted}: is another server there? Choose another --grpc-port"
            ) from None
        await server.start()

    def _options(self, connections: int) -> list[tuple[str, int]]:
        """Source: grpc/impl/channel_arg_names.h, and gRPC's "Keepalive User Guide"."""
        options: list[tuple[str, float]] = [
            ("grpc.max_receive_message_length", self._front.max_body_bytes),  # also once unpacked
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # else two servers could share the port
            ("grpc.max_allowed_incoming_connections", connections),  # each takes a descriptor
            # A connection that begins nothing, or asks for nothing any more, would keep its place from others.
            ("grpc.server_handshake_timeout_ms", self._limits.arrival_seconds * 1000),
            ("grpc.max_connection_idle_ms", self._limits.idle_seconds * 1000),
            # One connection would fill the queue of calls if there were no bound, and gRPC would drop others' calls
            # from it.
            ("grpc.max_concurrent_streams", self._limits.streams_per_connection),
            # Calls that are reset at once wait for a round trip.
            ("grpc.http2.ping_on_rst_stream_percent", 100),
            # Clients may ping as often as this, with calls or without, before they are cut off as too busy.
            ("grpc.http2.min_ping_interval_without_data_ms", self._limits.ping_seconds * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", _WATCH_S * 1000),
            ("grpc.keepalive_timeout_ms", _GONE_S * 1000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        return [(name, round(min(value, _LARGEST))) for name, value in options]

    async def stop(self, grace_s: float | None) -> None:
        """Take no new calls, answer those under way for at most ``grace_s`` seconds, then cut them off."""
        self._health.end_watches()
        if self._server is not None:
            await self._server.stop(grace_s)


def _admit_reader(front: InferFront, metadata: Sequence[tuple[str, Any]] | None) -> None:
    """Admit a caller that reads about gRPC what `/openapi.json` says of HTTP, with the same keys. Raises
    Unauthenticated, Forbidden."""
    scopes, _ = need_of("GET", "/openapi.json")
    front.access.check(_authorization(metadata), scopes)


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Each handshake has the pair that is in the files then, where it fits together."""
    shown = certificates.current()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (current := certificates.current()) is shown:
            return None
        shown = current
        return _pair(certificates)

    # None is what its documentation asks for where nothing changed.
    return grpc.dynamic_ssl_server_credentials(_pair(certificates), newest)  # type: ignore[arg-type]


def _pair(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([certificates.pem()])


class _Service(grpc.GenericRpcHandler):
    """Finds the call by its name, and what it needs."""

    def __init__(self, front: InferFront, calls: Calls, keyless: KeylessCalls, streams: Connections) -> None:
        self._front, self._calls, self._keyless, self._streams = front, calls, keyless, streams

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        package, _, name = handler_call_details.method.strip("/").rpartition("/")
        if package == HEALTH:
            return None
        known = package == SERVICE
        call = CALLS.get(name) if known else None
        like, way_out = NOT_OFFERED.get(name, (None, "")) if known else (None, "")
        if call is not None:
            like = call.like
        try:
            metadata = handler_call_details.invocation_metadata
            authorization = _authorization(metadata)
            scopes, _ = need_of(*(like or ("", handler_call_details.method)))
            self._front.access.check(authorization, scopes)
            if way_out:
                raise NotOffered(way_out)
        except HalfevenError as error:
            return _refusing(error)
        if call is None:
            return None
        return self._handler(
            call, authorization, load_format(metadata) if call.answer is Calls.infer else None
        )

    def _handler(self, call: Call, authorization: str | None, form: str | None) -> grpc.RpcMethodHandler:
        """``form``: of the load report that the call asks for."""

        async def unary(messages: AsyncIterator[Any], context: Any) -> Any:
            model = ""
            try:
                if call.is_open:
                    self._keyless.enter(context)
                request = call.request()
                # A message without fields says nothing. So no message is read that needs no key.
                if request.DESCRIPTOR.fields:
                    request = await only_message(messages, self._front.body_timeout_s, call.name)
                model = request.model_name if form else ""
                with self._front.call_span(f"{SERVICE}/{call.name}", context):
                    answer = await self._answer(call, authorization, request, context)
                add_load(context, self._front.load, form, model)
                return answer
            except Exception as error:
                if not isinstance(
                    error, Forbidden | Unauthenticated
                ):  # the load is for those who reach the model
                    add_load(context, self._front.load, form, model)
                await abort(context, error)

        async def stream(messages: AsyncIterator[Any], context: Any) -> None:
            await self._streamed(call, authorization, messages, context)

        def read(data: bytes) -> Any:
            check_parts(data, call.request.DESCRIPTOR)
            return call.request.FromString(data)

        write = call.response.SerializeToString
        if call.streams:
            return grpc.stream_stream_rpc_method_handler(stream, read, write)  # type: ignore[arg-type]
        # A unary handler of grpcio waits for its message without end: a few callers could hold every call.
        return grpc.stream_unary_rpc_method_handler(unary, read, write)  # type: ignore[arg-type]

    async def _streamed(
        self, call: Call, authorization: str | None, messages: AsyncIterator[Any], context: Any
    ) -> None:
        """Answer the messages of one stream."""
        unread = UnreadAnswers(self._front.bounds.budget)
        async with in_place(self._streams, context, "ModelInfer") as place:

            async def in_stream(request: Any) -> Any:
                place.asked()
                try:
                    with self._front.call_span(f"{SERVICE}/{call.name}", context):
                        answer = await self._answer(call, authorization, request)
                        return unread.counted(stream_response(request, answer))
                except Exception as error:
                    return unread.counted(stream_error(request, words_of(error)))

            try:
                async with aclosing(streamed(messages, in_stream, AHEAD)) as answers:
                    async for answer in answers:
                        await unread.write(context, answer)
                        place.answered()
            except DecodeError:
                raise unreadable(call.name) from None
            finally:
                unread.close()

    async def _answer(self, call: Call, authorization: str | None, request: Any, context: Any = None) -> Any:
        """``context``: that of a unary call. Until its caller has taken the answer, the call counts in its key's limit,
        and a large answer counts in the memory: gRPC cannot end the call before."""
        permit = self._front.access.admit(authorization, *call.need(request))
        budget, is_held = self._front.bounds.budget, False
        lease = budget.lease()
        try:
            lease.add(request.ByteSize())
            answer = await call.answer(self._calls, request, lease)
            if context is not None:
                is_held, size = True, answer.ByteSize()
                context.add_done_callback(lambda _: permit.close())
                if size > FREE_BYTES:
                    budget.take_anyway(size)
                    context.add_done_callback(lambda _: budget.give_back(size))
            return answer
        except Exception as error:
            if call.answer is Calls.infer:
                self._front.refusal(error, model=request.model_name)  # for the log
            elif not isinstance(error, HalfevenError):
                _LOG.error("the call %s failed", call.name, exc_info=error)
            raise
        finally:
            lease.close()
            if not is_held:
                permit.close()


def _authorization(metadata: Sequence[tuple[str, Any]] | None) -> str | None:
    sent = [value for key, value in metadata or () if key == "authorization"]
    if len(sent) > 1:
        raise Unauthenticated(f"the call has {len(sent)} authorization entries in its metadata; send one")
    return str(sent[0]) if sent else None


def _refusing(error: HalfevenError) -> grpc.RpcMethodHandler:
    """A handler that answers with the error, and reads no message."""

    async def refuse(messages: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type]
