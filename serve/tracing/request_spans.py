"""The spans of one request: one of kind SERVER, with the children ``queue``, ``assemble`` and ``compute``.

Names and attributes follow OpenTelemetry's semantic conventions for HTTP and RPC servers; those of ours begin with
``halfeven.``. Times are nanoseconds of the Unix clock.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from ..batching.interface import Answer

Attributes = Mapping[str, str | int]


class RequestSpans:
    """Makes spans with ``tracer``. The caller's trace goes on where its headers name one (W3C ``traceparent``)."""

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
