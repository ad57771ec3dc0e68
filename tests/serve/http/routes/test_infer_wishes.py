"""The wishes of an infer request beside its tensors: compression, terms, ids.

Every coding in and out, and `--triton-strict`, are in tests/conformance, on the whole server.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.serve.batching.interface import NO_TERMS
from halfeven.serve.http.codecs.infer import InferCodec
from halfeven.serve.http.inference import Inference
from halfeven.serve.http.routes.infer import SMALL_JSON, InferFront

from tests.patience import PATIENCE_S
from tests.serve.conftest import ASKED, GOOD, running

URL = "/v2/models/double/infer"
LENGTH = "inference-header-content-length"


def test_an_answer_is_compressed_for_who_names_one_coding_and_for_nobody_else(http: httpx.Client) -> None:
    binary = {**ASKED, "parameters": {"binary_data_output": True}}
    plain = http.post(URL, json=binary, headers={"accept-encoding": "gzip, deflate"})
    assert "content-encoding" not in plain.headers
    for coding in ("gzip", "deflate"):
        answer = http.post(URL, json=binary, headers={"accept-encoding": f"{coding}, br;q=0.1"})
        assert answer.headers["content-encoding"] == coding
        assert answer.headers[LENGTH] == plain.headers[LENGTH]  # of the JSON before it was compressed
        assert answer.content == plain.content  # httpx decompresses
    refused = http.post(URL, content=b"x", headers={"content-encoding": "br"})
    assert (refused.status_code, refused.headers["accept-encoding"]) == (501, "gzip, deflate")


def test_terms_reach_the_queue_as_tritonclient_sends_them(server: str, roster: Any) -> None:
    given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    with triton.InferenceServerClient(server) as client:
        client.infer("double", [given], priority=1, timeout=2500, request_id="me")
        client.infer("double", [given], parameters={"deterministic": True, "mine": "ignored"})
        client.infer("double", [given])
    first, second, third = roster.models["double"].terms
    assert (first.priority, first.timeout_ns, first.deterministic, first.key) == (1, 2_500_000, False, "me")
    assert (second.priority, second.deterministic, second.key) == (0, True, None)
    assert third is NO_TERMS


def test_request_ids_are_said_back_on_answers_and_refusals(http: httpx.Client) -> None:
    for name in ("x-request-id", "triton-request-id"):
        assert http.post(URL, json=ASKED, headers={name: "a-7"}).headers[name] == "a-7"
        refused = http.post(URL, content=b"{", headers={name: "a-8"})
        assert (refused.status_code, refused.headers[name]) == (400, "a-8")
        assert name not in http.post(URL, json=ASKED, headers={name: "x" * 200}).headers


def test_a_failure_is_found_in_the_log_by_its_request_id(
    http: httpx.Client, roster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(x: np.ndarray) -> list[np.ndarray]:
        raise RuntimeError("broken")

    roster.models["double"].compute = broken
    with caplog.at_level(logging.ERROR):
        assert http.post(URL, json=ASKED, headers={"x-request-id": "find-me"}).status_code == 500
    assert "find-me" in [getattr(record, "request_id", None) for record in caplog.records]


def test_each_request_is_a_record_where_the_operator_wants_them(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    http.post(URL, json=ASKED)
    with caplog.at_level(logging.INFO, "halfeven.requests"):
        http.post(URL, json=ASKED, headers={"x-request-id": "first"})
        http.post(URL, json={**ASKED, "id": "second"}, headers={"accept-encoding": ""})
        http.post("/v2/models/nobody/infer", json=ASKED, headers={"x-request-id": "third"})
    records = [vars(record) for record in caplog.records if record.name == "halfeven.requests"]
    assert [record["request_id"] for record in records] == ["first", "second", "third"]
    answered, refused = records[0], records[2]
    assert (answered["model"], answered["version"], answered["precision"], answered["status"]) == (
        "double",
        "3",
        "fp16",
        200,
    )
    assert (answered["rows"], answered["queue_ms"], answered["compute_ms"]) == (1, 1.5, 2.25)
    assert (refused["model"], refused["status"]) == ("nobody", 404)


async def no_app(*_: Any) -> None:
    raise AssertionError("passed through")


def test_a_model_that_is_still_starting_is_503_to_the_strict_too(roster: Any) -> None:
    with running(InferFront(no_app, roster, inference=Inference(roster, as_triton=True))) as address:
        answer = httpx.post(f"http://{address}/v2/models/starting/infer", json=ASKED, timeout=PATIENCE_S)
    assert answer.status_code == 503 and "no active version" in answer.json()["error"]


@pytest.mark.slow
def test_large_json_is_read_beside_the_event_loop_and_others_are_answered_meanwhile(
    roster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, others_done = threading.Event(), threading.Event()
    read = InferCodec.read

    def slow(self: InferCodec, body: bytes, header_length: str | None = None) -> Any:
        if len(body) > SMALL_JSON:
            reading.set()
            assert others_done.wait(PATIENCE_S)
        return read(self, body, header_length)

    monkeypatch.setattr(InferCodec, "read", slow)
    large = GOOD + b" " * SMALL_JSON
    with running(InferFront(no_app, roster)) as address, ThreadPoolExecutor() as pool:
        url = f"http://{address}{URL}"
        answer = pool.submit(httpx.post, url, content=large, timeout=PATIENCE_S)
        with_head = pool.submit(
            httpx.post,
            url,
            content=large,
            headers={LENGTH: str(len(large)), "accept-encoding": ""},
            timeout=PATIENCE_S,
        )
        assert reading.wait(PATIENCE_S)
        assert httpx.post(url, json=ASKED, timeout=PATIENCE_S).status_code == 200
        others_done.set()
        for one in (answer.result(PATIENCE_S), with_head.result(PATIENCE_S)):
            assert one.json()["outputs"][0]["data"] == [2, 4, 6, 8]
