"""The ways of a request to a model (from the parser, through ASGI, ``:predict``, gRPC) say the same of the same."""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.grpc import calls
from halfeven.serve.http.codecs import predict
from halfeven.serve.http.routes import infer

from tests.patience import PATIENCE_S
from tests.serve.grpc.conftest import Both, Start
from tests.serve.grpc.theirs import service_pb2, service_pb2_grpc
from tests.specs import tensor

X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
NARROW = ModelSpec("double", (tensor("x", "FP32", -1, 3),), (tensor("y", "FP32", -1, 3),), 8)


def by_http(path: str, body: dict[str, Any], **headers: str) -> Callable[[Both], tuple[str, str]]:
    def ask(both: Both) -> tuple[str, str]:
        url = f"http://{both.http}{path}"
        answer = httpx.post(url, content=json.dumps(body), headers=headers, timeout=PATIENCE_S)
        return str(answer.status_code), answer.text

    return ask


def by_grpc(both: Both) -> tuple[str, str]:
    given = service_pb2.ModelInferRequest.InferInputTensor(**X, contents={"fp32_contents": [1, 2, 3, 4]})
    with grpc.insecure_channel(both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(
                service_pb2.ModelInferRequest(model_name="double", inputs=[given]), timeout=PATIENCE_S
            )
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""  # type: ignore[attr-defined] (a Call as well)
    return "OK", ""


V2 = "/v2/models/double/infer", {"inputs": [{**X, "data": [1, 2, 3, 4]}]}
WAYS = {
    "from the parser": by_http(*V2),
    "through ASGI": by_http(*V2, **{"x-request-id": "one"}),
    "predict": by_http("/v1/models/double:predict", {"instances": [[1, 2, 3, 4]]}),
    "gRPC": by_grpc,
}
GONE = ("503", "UNAVAILABLE")
CHANGED = (
    "a version of model 'double' with other inputs or outputs became active while this request was on its way"
)


@pytest.fixture
def both(start: Start) -> Both:
    return start()


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_taken_away_while_a_request_waits_is_said_to_be(both: Both, way: str) -> None:
    served = both.roster.models["double"]
    served.holding = True
    with ThreadPoolExecutor(1) as callers:
        answer: Future[tuple[str, str]] = callers.submit(WAYS[way], both)
        assert served.submitted.wait(PATIENCE_S)
        (future,) = served.held
        future.get_loop().call_soon_threadsafe(future.cancel)
        status, words = answer.result(PATIENCE_S)
    assert status in GONE and "the model was taken away while the request waited; send it again" in words


# The parser reads no large body.
@pytest.mark.parametrize("way", [name for name in WAYS if name != "from the parser"])
def test_inputs_that_changed_while_a_body_was_read_are_said(
    both: Both, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, threads = both.roster.models["double"], both.front.inference.worker_threads
    for place, limit in ((infer, "SMALL_JSON"), (calls, "SMALL_JSON"), (predict, "SHORT_JSON")):
        monkeypatch.setattr(place, limit, 8)

    async def swapping(read: Callable[..., Any], *arguments: Any) -> Any:
        request = read(*arguments)
        served.spec = NARROW
        return request

    monkeypatch.setattr(threads, "run", swapping)
    status, words = WAYS[way](both)
    assert status in GONE and CHANGED in words
    assert not served.rows


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_is_queued_while_other_inputs_become_active_gets_no_answer_of_theirs(
    both: Both, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = both.roster.models["double"]
    submit = served.submit

    def swapping(*arguments: Any) -> Any:
        served.spec = NARROW
        return submit(*arguments)

    monkeypatch.setattr(served, "submit", swapping)
    served.holding = True
    status, words = WAYS[way](both)
    assert status in GONE and CHANGED in words
    (future,) = served.held
    assert future.cancelled()
