"""Traces of requests, over HTTP and gRPC, kept in memory."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from halfeven.models.errors import BadSetting, EngineFailed, Overloaded
from halfeven.serve.grpc.grpc_server import GrpcServer
from halfeven.serve.http.connection.hot_protocol import HotProtocol
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.tracing.otel_environment import provider_from, traces_wanted
from halfeven.serve.tracing.traced_front import NOT_TRACED, RequestSpans, TracedFront, TracedInference
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.patience import PATIENCE_S
from tests.serve.conftest import HISTORY, FakeRoster, make_roster, started
from tests.serve.grpc.theirs import service_pb2, service_pb2_grpc

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
BODY = json.dumps({"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": ROWS.tolist()}]})


@dataclass
class Traced:
    roster: FakeRoster
    http: httpx.Client
    grpc: str
    kept: InMemorySpanExporter

    def only(self) -> Any:
        (span,) = self.kept.get_finished_spans()
        return span

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.kept.get_finished_spans()}


def front_of(roster: FakeRoster, provider: TracerProvider) -> TracedFront:
    spans = RequestSpans(provider.get_tracer("test"))
    inference = TracedInference(spans, roster)
    app = build_app(roster, lambda: b"", HISTORY, inference=inference)
    return TracedFront(spans, app, roster, inference=inference)


@pytest.fixture(scope="module")
def server() -> Iterator[Traced]:
    provider, kept, roster = TracerProvider(), InMemorySpanExporter(), make_roster()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    front = front_of(roster, provider)
    beside = GrpcServer(front, roster, "127.0.0.1", 0)
    with started(front, beside=beside) as running:
        port = running.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
            yield Traced(roster, client, f"127.0.0.1:{beside.port}", kept)


@pytest.fixture
def traced(server: Traced) -> Traced:
    vars(server.roster).update(vars(make_roster()))
    server.kept.clear()
    return server


def has_phases(traced: Traced, name: str) -> Any:
    """The server span, whose three children lie in it one behind the other."""
    found = traced.spans()
    parent = found[name]
    assert set(found) == {name, "queue", "assemble", "compute"}
    for child in ("queue", "assemble", "compute"):
        assert found[child].parent.span_id == parent.context.span_id
    assert found["queue"].end_time == found["assemble"].start_time
    assert found["assemble"].end_time == found["compute"].start_time
    assert found["queue"].end_time - found["queue"].start_time == 1_500_000, "as the answer says"
    assert found["compute"].end_time - found["assemble"].start_time == 2_250_000
    assert found["compute"].attributes["halfeven.batch_rows"] == 2
    assert (parent.attributes["halfeven.version"], parent.attributes["halfeven.precision"]) == ("3", "fp16")
    return parent


@pytest.mark.parametrize(
    ("path", "route", "body"),
    [
        ("/v2/models/double/infer", "/v2/models/{m}/infer", BODY),
        ("/v2/models/double/versions/3/infer", "/v2/models/{m}/versions/{v}/infer", BODY),
        ("/v1/models/double:predict", "/v1/models/{m}:predict", json.dumps({"instances": ROWS.tolist()})),
    ],
)
def test_an_http_request_goes_on_with_its_caller_s_trace_and_names_its_own_span(
    traced: Traced, path: str, route: str, body: str
) -> None:
    answer = traced.http.post(path, content=body, headers={"traceparent": CALLER})
    assert answer.status_code == 200
    parent = has_phases(traced, f"POST {route}")
    assert f"{parent.context.trace_id:032x}" == TRACE and f"{parent.parent.span_id:016x}" == SPAN
    assert answer.headers["traceparent"] == f"00-{TRACE}-{parent.context.span_id:016x}-01"
    assert parent.kind.name == "SERVER"
    assert parent.attributes["http.response.status_code"] == 200
    assert parent.attributes["http.route"] == route


def infer(traced: Traced, stream: bool = False) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4]}
    request = service_pb2.ModelInferRequest(
        model_name="double", inputs=[tensor], raw_input_contents=[ROWS.tobytes()]
    )
    with grpc.insecure_channel(traced.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("traceparent", CALLER),)
        if stream:
            return list(stub.ModelStreamInfer(iter([request]), timeout=PATIENCE_S, metadata=metadata))
        return stub.ModelInfer.with_call(request, timeout=PATIENCE_S, metadata=metadata)[1]


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_a_grpc_call_goes_on_with_its_caller_s_trace_and_names_its_own_span(
    traced: Traced, call: str
) -> None:
    answered = infer(traced, stream=call == "ModelStreamInfer")
    parent = has_phases(traced, f"inference.GRPCInferenceService/{call}")
    assert f"{parent.context.trace_id:032x}" == TRACE and f"{parent.parent.span_id:016x}" == SPAN
    if call == "ModelInfer":
        trailing = dict(answered.trailing_metadata())
        assert trailing["traceparent"] == f"00-{TRACE}-{parent.context.span_id:016x}-01"


def test_a_request_without_a_trace_begins_one(traced: Traced) -> None:
    answer = traced.http.post("/v2/models/double/infer", content=BODY)
    parent = has_phases(traced, "POST /v2/models/{m}/infer")
    assert parent.parent is None and f"{parent.context.trace_id:032x}" in answer.headers["traceparent"]


@pytest.mark.parametrize(
    ("fault", "status", "call_status", "is_error"),
    [
        (EngineFailed("it broke"), 500, "INTERNAL", True),
        (Overloaded("the queue is full", 1.0), 503, "UNAVAILABLE", True),
        (None, 400, "INVALID_ARGUMENT", False),
    ],
)
def test_a_fault_of_the_server_is_an_error_of_the_span_and_a_bad_request_is_not(
    traced: Traced, fault: Any, status: int, call_status: str, is_error: bool
) -> None:
    traced.roster.models["double"].refusal = fault
    body = BODY if fault else '{"inputs": []}'
    assert traced.http.post("/v2/models/double/infer", content=body).status_code == status
    span = traced.only()
    assert span.attributes["http.response.status_code"] == status
    assert (span.status.status_code.name == "ERROR") == is_error
    if fault:
        traced.kept.clear()
        with pytest.raises(grpc.RpcError) as refused:
            infer(traced)
        assert refused.value.code().name == call_status, "the refusal itself is as without traces"
        span = traced.only()
        assert span.status.status_code.name == "ERROR"
        assert span.attributes["rpc.response.status_code"] == call_status


def test_probes_and_scrapes_have_no_spans(traced: Traced) -> None:
    for path in sorted(NOT_TRACED):
        assert traced.http.get(path).status_code == 200
    assert traced.kept.get_finished_spans() == ()


def test_what_the_sampler_leaves_out_has_no_children(traced: Traced) -> None:
    provider, kept = TracerProvider(sampler=ALWAYS_OFF), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with started(front_of(make_roster(), provider)) as running:
        port = running.servers[0].sockets[0].getsockname()[1]
        answer = httpx.post(f"http://127.0.0.1:{port}/v2/models/double/infer", content=BODY)
    sampled = int(answer.headers["traceparent"].rpartition("-")[2], 16) & 1
    assert answer.status_code == 200 and not sampled
    assert kept.get_finished_spans() == ()


def test_without_traces_the_infer_route_has_no_code_of_theirs() -> None:
    """The front and the roster are the plain ones; the only question is asked once a connection, not once a request."""
    assert InferFront.hot and not TracedFront.hot
    functions = {name: one.__code__ for name, one in vars(HotProtocol).items() if hasattr(one, "__code__")}
    assert [name for name, code in functions.items() if "hot" in code.co_names] == ["__init__"]
    assert [name for name in vars(InferFront) if "span" in name] == ["call_span"], "which gRPC alone calls"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_s_variables_turn_traces_on(environment: dict[str, str], wanted: bool) -> None:
    assert traces_wanted(environment) == wanted


def test_an_exporter_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(BadSetting, match=r"'zipkin'.*not installed.*console"):
        provider_from({"OTEL_TRACES_EXPORTER": "zipkin"})
