"""The infer route over real sockets: a real client, callers who send nonsense, and callers who leave."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.models.errors import EngineFailed, Overloaded
from halfeven.serve.http.routes.infer import InferFront

from ...conftest import ASKED
from ..raw_requests import connected, message

URL = "/v2/models/double/infer"


def still_serves(http: httpx.Client) -> None:
    answer = http.post(URL, json=ASKED)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_tritonclient_infers(server: str, rows: int, binary_in: bool, binary_out: bool | None) -> None:
    array = np.random.default_rng().standard_normal((rows, 4), np.float32)
    given = triton.InferInput("x", [rows, 4], "FP32").set_data_from_numpy(array, binary_data=binary_in)
    outputs = None if binary_out is None else [triton.InferRequestedOutput("y", binary_data=binary_out)]
    with triton.InferenceServerClient(server) as client:
        result = client.infer("double", [given], outputs=outputs, request_id="me", model_version="3")
    np.testing.assert_array_equal(result.as_numpy("y"), array * 2)
    response: Any = result.get_response()
    assert response["id"] == "me" and response["model_version"] == "3"
    assert response["parameters"] == {"halfeven_precision": "fp16", "halfeven_digest": "0123456789ab"}


def test_every_answer_says_who_gave_it_and_what_it_took(http: httpx.Client) -> None:
    headers = http.post(URL, json=ASKED).headers
    assert headers["halfeven-version"] == "3" and headers["halfeven-precision"] == "fp16"
    assert headers["halfeven-digest"] == "0123456789abcdef" * 4
    phases = dict(item.split(";dur=") for item in headers["server-timing"].split(", "))
    assert phases.keys() == {"queue", "assemble", "compute", "total"}
    assert (phases["queue"], phases["assemble"], phases["compute"]) == ("1.500", "0.000", "2.250")
    assert 0 < float(phases["total"]) < 5000
    assert headers["content-type"] == "application/json"


def test_a_binary_answer_says_where_its_json_ends(http: httpx.Client) -> None:
    answer = http.post(URL, json={**ASKED, "parameters": {"binary_data_output": True}})
    head = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert json.loads(answer.content[:head])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    np.testing.assert_array_equal(np.frombuffer(answer.content[head:], "<f4"), [2, 4, 6, 8])


def test_an_unknown_version_and_a_model_that_is_not_ready_are_refused(http: httpx.Client) -> None:
    for path, status, fault in (
        ("double/versions/9", 404, "Request for unknown model"),
        ("starting", 503, "model 'starting' has no active version"),
    ):
        answer = http.post(f"/v2/models/{path}/infer", json=ASKED)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert fault in answer.json()["error"]
    still_serves(http)


@pytest.mark.parametrize(
    ("url", "body", "key"),
    [(URL, ASKED, "error"), ("/v1/models/double:predict", {"instances": [[1, 2, 3, 4]]}, "detail")],
)
def test_a_full_queue_answers_503_and_when_to_come_back(
    url: str, body: Any, key: str, http: httpx.Client, roster: Any
) -> None:
    roster.models["double"].refusal = Overloaded("the queue of 'double' is full", 1.2)
    answer = http.post(url, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()[key] == "the queue of 'double' is full"
    roster.models["double"].refusal = None
    still_serves(http)


def test_a_failing_engine_is_500_in_its_own_words_and_a_bug_in_ours(http: httpx.Client, roster: Any) -> None:
    def broken(x: np.ndarray) -> list[np.ndarray]:
        raise errors.pop()

    double = roster.models["double"]
    works, double.compute = double.compute, broken
    errors: list[Exception] = [RuntimeError("a secret path"), EngineFailed("the device raised X")]
    assert http.post(URL, json=ASKED).json() == {"error": "the device raised X"}
    answer = http.post(URL, json=ASKED)
    assert answer.status_code == 500 and "secret" not in answer.text and "bug in halfeven" in answer.text
    double.compute = works
    still_serves(http)


def test_a_caller_who_leaves_while_sending_submits_nothing(
    server: str, http: httpx.Client, roster: Any
) -> None:
    with connected(server) as connection:
        connection.sendall(message(b"{" * 100)[:-99])
    still_serves(http)
    assert roster.models["double"].rows == [1]


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": URL},
        {"type": "http", "path": "/v2/models/double", "method": "GET"},
        {"type": "http", "path": "/v2/models//infer", "method": "POST"},
        {"type": "http", "path": "/v2/models/a/b/infer", "method": "POST"},
        {"type": "http", "path": "/v2/models/a/versions//infer", "method": "POST"},
        {"type": "http", "path": "/x/infer", "method": "POST"},
    ],
    ids=str,
)
def test_everything_else_passes_through_untouched(scope: dict[str, Any], roster: Any) -> None:
    passed = []
    scope["headers"] = []

    async def inner(*arguments: Any) -> None:
        passed.append(arguments)

    async def receive() -> Any:
        raise AssertionError("read from")

    async def send(message: Any) -> None:
        raise AssertionError("written to")

    asyncio.run(InferFront(inner, roster)(scope, receive, send))
    assert passed == [(scope, receive, send)] and passed[0][0] is scope


def test_a_version_with_a_new_signature_is_read_by_its_own(http: httpx.Client, roster: Any) -> None:
    still_serves(http)
    roster.models["double"].spec = roster.models["double"].spec.with_max_batch_size(1)
    most = roster.models["double"].spec.max_request_rows
    many = {"inputs": [{**ASKED["inputs"][0], "shape": [most + 1, 4], "data": [0] * 4 * (most + 1)}]}
    assert f"batch-size must be <= {most} for 'double'" in http.post(URL, json=many).json()["error"]
    still_serves(http)
