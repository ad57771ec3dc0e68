"""OpenTelemetry's own environment variables say whether traces are wanted, and where they go.

Source: OpenTelemetry specification, "Environment Variable Specification" and "OTLP Exporter Configuration". The
sampler (``OTEL_TRACES_SAMPLER``), the resource (``OTEL_SERVICE_NAME``), the batches (``OTEL_BSP_…``) and the endpoint
are read by the SDK and its exporter themselves.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ...models.errors import BadSetting

if TYPE_CHECKING:  # an optional dependency
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ASKING = (_EXPORTER, "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OTLP_BY_PROTOCOL = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_EXTRA = "pip install 'halfeven[otel]'"


def traces_wanted(environment: Mapping[str, str]) -> bool:
    """True if one of the variables asks for traces: an exporter, or the endpoint of a collector."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    none = environment.get(_EXPORTER, "").strip() == "none"
    return not off and not none and any(environment.get(name) for name in _ASKING)


def provider_from(environment: Mapping[str, str]) -> "TracerProvider":
    """The provider of tracers, with the exporters that the environment names (default: OTLP over HTTP).

    Raises BadSetting where the extra is not installed, or where an exporter is unknown.
    """
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        asked = next(name for name in _ASKING if environment.get(name))
        raise BadSetting(
            f"{asked} is set, and OpenTelemetry is not installed: {_EXTRA}, or set OTEL_SDK_DISABLED=true"
        ) from error
    named = "OTEL_SERVICE_NAME" in environment or "service.name" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create() if named else Resource.create({SERVICE_NAME: "halfeven"})
    provider = TracerProvider(resource=resource)
    for name in (environment.get(_EXPORTER) or "otlp").split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip(), environment)))
    return provider


def _exporter(name: str, environment: Mapping[str, str]) -> "SpanExporter":
    entry = name
    if name == "otlp":
        protocol = (
            environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
            or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or "http/protobuf"
        )
        entry = _OTLP_BY_PROTOCOL.get(protocol, protocol)
    found = list(entry_points(group="opentelemetry_traces_exporter", name=entry))
    if not found:
        known = sorted(one.name for one in entry_points(group="opentelemetry_traces_exporter"))
        raise BadSetting(
            f"{_EXPORTER} = {name!r} asks for the exporter '{entry}', which is not installed; installed are "
            f"{', '.join(known)}. {_EXTRA} brings otlp (http/protobuf) and console"
        )
    return found[0].load()()
