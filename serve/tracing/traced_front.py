"""A server that writes traces: every request over HTTP and every call over gRPC has a span, with its phases inside.

A server without traces has none of this code on its way. With traces, infer requests take the way through ASGI, so that
all their headers are read.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from starlette.types import Message, Receive, Scope, Send

from ..batching.interface import Answer, Served
from ..http.codecs.infer import InferCodec
from ..http.error_mapping import grpc_status_of
from ..http.inference import Begun, Inference, R
from ..http.routes.infer import InferFront, asked_of

Attributes = Mapping[str, str | int]


class RequestSpans:
    """Makes the spans of a request with ``tracer``: one of kind SERVER, with the children ``queue``, ``assemble`` and
    ``compute``. Names and attributes follow OpenTelemetry's semantic conventions for HTTP and RPC servers; those of
    ours begin with ``halfeven.``. Times are nanoseconds of the Unix clock.

    The caller's trace goes on where its headers name one (W3C ``traceparent``)."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def server(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Iterator[Span]:
        """The span around a whole request; it is the current one inside the block."""
        parent = propagate.extract(headers)
        with self._tracer.start_as_current_span(
            name, parent, SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            yield span

    def phases(self, answer: Answer, submitted_ns: int, parent: Context) -> None:
        """The children of an answered request that was given to its batcher at ``submitted_ns``."""
        span = trace.get_current_span(parent)
        if not span.is_recording():
            return
        span.set_attribute("halfeven.version", answer.prepared.version)
        span.set_attribute("halfeven.precision", answer.precision)
        began_ns = submitted_ns + answer.queue_ns
        assembled_ns = began_ns + answer.assemble_ns
        ended_ns = began_ns + answer.compute_ns
        self._child("queue", submitted_ns, began_ns, parent)
        self._child("assemble", began_ns, assembled_ns, parent)
        batch = {"halfeven.batch_rows": answer.batch_rows, "halfeven.rescued_rows": answer.rescued}
        self._child("compute", assembled_ns, ended_ns, parent, batch)

    def _child(
        self, name: str, began_ns: int, ended_ns: int, parent: Context, attributes: Attributes | None = None
    ) -> None:
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=began_ns)
        span.end(ended_ns)


def traceparent() -> str | None:
    """The current span as the W3C header says it."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")


def failed(span: Span, kind: str) -> None:
    """Mark a span whose request failed by a fault of the server."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


# Something asks these every few seconds.
NOT_TRACED = frozenset(("/healthz", "/v2/health/live", "/v2/health/ready", "/metrics"))
_FAULTS = frozenset(("INTERNAL", "UNIMPLEMENTED", "UNAVAILABLE"))  # of the server, as 5xx are


class TracedFront(InferFront):
    """An `InferFront` with ``spans`` around it."""

    hot = False

    def __init__(self, spans: RequestSpans, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in NOT_TRACED:
            await super().__call__(scope, receive, send)
            return
        method = scope["method"]
        attributes = {
            "http.request.method": method,
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
        }
        with self._spans.server(method, _headers(scope), attributes) as span:
            await super().__call__(scope, receive, _noting(span, send))
            if (route := _route_of(scope)) is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)

    @contextmanager
    def call_span(self, name: str, context: Any) -> Iterator[None]:
        """The span around one gRPC call, or one message of a stream."""
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        service, _, method = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        with self._spans.server(name, headers, attributes) as span:
            if (parent := traceparent()) is not None:
                context.set_trailing_metadata((("traceparent", parent),))
            try:
                yield
            except Exception as error:
                status = grpc_status_of(error)
                span.set_attribute("rpc.response.status_code", status)
                if status in _FAULTS:
                    failed(span, status)
                raise


class TracedInference(Inference):
    """An `Inference` that notes the phases of each answer on the span of its request, whichever protocol asks."""

    def __init__(self, spans: RequestSpans, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._spans = spans

    def _queued(self, served: Served, codec: InferCodec, request: R, since_ns: int) -> Begun[R]:
        parent, submitted_ns = get_current(), time.time_ns()
        begun = super()._queued(served, codec, request, since_ns)
        # Callbacks of a future that is done would run after the request's span has ended.
        if begun.future.done():
            self._note(submitted_ns, parent, begun.future)
        else:
            begun.future.add_done_callback(partial(self._note, submitted_ns, parent))
        return begun

    def _note(self, submitted_ns: int, parent: Context, future: asyncio.Future[Answer]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._spans.phases(future.result(), submitted_ns, parent)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _noting(span: Span, send: Send) -> Send:
    """``send`` that notes the answer's status on the span, and names the span in the answer's headers."""
    parent = traceparent()

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                failed(span, str(status))
            if parent is not None:
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), (b"traceparent", parent.encode())],
                }
        await send(message)

    return noting


def _route_of(scope: Scope) -> str | None:
    """The pattern of the path; None where no route has it."""
    if (route := scope.get("route")) is not None:
        return route.path
    asked = asked_of(scope["path"])
    if asked is None:
        return None
    return "/v2/models/{m}/infer" if asked[1] is None else "/v2/models/{m}/versions/{v}/infer"
