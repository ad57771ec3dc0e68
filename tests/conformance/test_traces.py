"""A collector of OpenTelemetry's protocol (OTLP over HTTP) receives a server's spans; only OTEL_… variables are set."""

import gzip
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.conformance.conftest import answers_right
from tests.patience import PATIENCE_S
from tests.serve.conftest import running


class Collector(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Received)
        self.spans: dict[str, Any] = {}
        self.service = ""
        self.complete = threading.Event()


class _Received(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        collector = cast(Collector, self.server)
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            collector.service = attributes["service.name"]
            for scope in resource.scope_spans:
                collector.spans |= {span.name: span for span in scope.spans}
        self.send_response(200)
        self.end_headers()
        if len(collector.spans) >= 4:
            collector.complete.set()

    def log_message(self, format: str, *arguments: Any) -> None: ...


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_request_s_span_and_its_phases_arrive_at_a_collector(
    collector: Collector, hosted: Path, tmp_path: Path
) -> None:
    shutil.copytree(hosted / "models/simple", tmp_path / "models/simple")
    app, roster = build(read_settings(store=tmp_path, device="cpu"), Store(tmp_path))
    with running(app) as address:
        roster.wait(PATIENCE_S)
        with httpx.Client(base_url=f"http://{address}", verify=False) as client:
            answers_right(client)
        assert collector.complete.wait(PATIENCE_S)
    parent = collector.spans["POST /v2/models/{m}/infer"]
    phases = [collector.spans[name] for name in ("queue", "assemble", "compute")]
    assert collector.service == "halfeven"
    assert {span.parent_span_id for span in phases} == {parent.span_id}
    assert parent.start_time_unix_nano <= phases[0].start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= parent.end_time_unix_nano
