"""Every answer validates against the standard's own OpenAPI document, which MLServer's package carries.

Source: Open Inference Protocol V2, data plane, as `mlserver/rest/openapi/dataplane.json` (Apache-2.0) has it. Two words
of it are no JSON Schema and are read as what they mean: the type ``bytes``, and data that must be there (it may be
binary, behind the JSON, by the protocol's binary extension).
"""

import copy
import json
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest
import tritonclient.http as triton

from tests.conformance.conftest import COUNTING, ONES, SIMPLE
from tests.conformance.outside_clients import PEERS, WITHOUT_PEERS

pytestmark = WITHOUT_PEERS
Document = dict[str, Any]
ROUTES = {
    "/v2": "/v2",
    "/v2/models/{model_name}": "/v2/models/simple",
    "/v2/models/{model_name}/versions/{model_version}": "/v2/models/simple/versions/1",
    "/v2/health/live": "/v2/health/live",
    "/v2/health/ready": "/v2/health/ready",
    "/v2/models/{model_name}/ready": "/v2/models/simple/ready",
    "/v2/models/{model_name}/versions/{model_version}/ready": "/v2/models/simple/versions/1/ready",
}
INFER = "/v2/models/{model_name}/infer"
GOOD = {"id": "7", "inputs": [COUNTING, ONES]}


@pytest.fixture(scope="module")
def standard() -> Document:
    text = (PEERS / "mlserver/rest/openapi/dataplane.json").read_text()
    return json.loads(text.replace('"type": "bytes"', '"type": "string"'))


def validate(
    standard: Document, route: str, method: str, answer: httpx.Response, body: bytes | None = None
) -> None:
    """Hold an answer against what the standard says of its route and status."""
    said = standard["paths"][route][method]["responses"].get(str(answer.status_code))
    assert said is not None, f"the standard has no {answer.status_code} for {method} {route}: {answer.text}"
    for kind, content in said.get("content", {}).items():
        assert answer.headers["content-type"].partition(";")[0] in (kind, "application/octet-stream")
        schema = {**content["schema"], "components": standard["components"]}
        jsonschema_rs.validator_for(schema).validate(json.loads(answer.content if body is None else body))


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_read_is_as_the_standard_says(http: httpx.Client, standard: Document, route: str) -> None:
    answer = http.get(ROUTES[route])
    assert answer.status_code == 200
    validate(standard, route, "get", answer)


@pytest.mark.parametrize("path", ["/v2/models/nobody", "/v2/models/simple/versions/99"])
def test_what_is_not_there_is_told_as_the_standard_says(
    http: httpx.Client, standard: Document, path: str
) -> None:
    route = "/v2/models/{model_name}" + ("/versions/{model_version}" if "versions" in path else "")
    answer = http.get(path)
    assert answer.status_code == 404
    validate(standard, route, "get", answer)


def test_answers_and_refusals_are_as_the_standard_says(http: httpx.Client, standard: Document) -> None:
    bad = [
        {**GOOD, "inputs": [COUNTING]},
        {**GOOD, "inputs": [COUNTING, {**ONES, "datatype": "FP32"}]},
        {},
        [],
    ]
    for asked, status in ((GOOD, 200), *((one, 400) for one in bad)):
        answer = http.post(SIMPLE, content=json.dumps(asked))
        assert answer.status_code == status, answer.text
        validate(standard, INFER, "post", answer)
    versioned = http.post("/v2/models/simple/versions/1/infer", content=json.dumps(GOOD))
    validate(standard, "/v2/models/{model_name}/versions/{model_version}/infer", "post", versioned)
    validate(standard, INFER, "post", http.post("/v2/models/nobody/infer", content=json.dumps(GOOD)))


@pytest.mark.parametrize("model", ["onnx_zero_1_float32", "onnx_zero_1_float16", "simple_int8", "ranked"])
def test_every_datatype_and_the_classification_answer_as_the_standard_says(
    http: httpx.Client, standard: Document, model: str
) -> None:
    found = http.get(f"/v2/models/{model}").json()
    inputs = []
    for tensor in found["inputs"]:
        shape = [2, *(6 if size == -1 else size for size in tensor["shape"][1:])]
        data = np.ones(shape).ravel().astype(int).tolist()
        inputs.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": data})
    asked: dict[str, Any] = {"inputs": inputs}
    if model == "ranked":
        asked["outputs"] = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    answer = http.post(f"/v2/models/{model}/infer", content=json.dumps(asked))
    assert answer.status_code == 200, answer.text
    validate(standard, INFER, "post", answer)


def test_the_json_before_binary_tensors_is_as_the_standard_says(
    http: httpx.Client, standard: Document
) -> None:
    inputs = [
        triton.InferInput(f"INPUT{i}", [1, 16], "INT32").set_data_from_numpy(np.ones((1, 16), np.int32))
        for i in (0, 1)
    ]
    body, length = triton.InferenceServerClient.generate_request_body(inputs)
    answer = http.post(SIMPLE, content=body, headers={"inference-header-content-length": str(length)})
    head = answer.content[: int(answer.headers["inference-header-content-length"])]
    assert len(head) < len(answer.content)
    binary = copy.deepcopy(standard)
    binary["components"]["schemas"]["ResponseOutput"]["required"].remove("data")
    validate(binary, INFER, "post", answer, head)
    sizes = [output["parameters"]["binary_data_size"] for output in json.loads(head)["outputs"]]
    assert sum(sizes) == len(answer.content) - len(head)


def test_the_repository_is_as_the_standard_says(http: httpx.Client) -> None:
    document = json.loads((PEERS / "mlserver/rest/openapi/model_repository.json").read_text())
    index = http.post("/v2/repository/index", content="{}")
    assert {"simple", "ranked"} <= {entry["name"] for entry in index.json()}
    validate(document, "/v2/repository/index", "post", index)
    for verb in ("load", "unload"):
        refused = http.post(f"/v2/repository/models/nobody/{verb}", content="{}")
        assert refused.status_code >= 400 and list(refused.json()) == ["error"]


def test_a_wrong_answer_would_be_found(standard: Document) -> None:
    """The validation itself: an answer without its outputs, and one with a wrong datatype."""
    wrong = {"model_name": "m", "outputs": [{"name": "y", "shape": [1], "datatype": "FLOAT", "data": [1.0]}]}
    for body in ({"model_name": "m"}, wrong):
        answer = httpx.Response(200, json=body)
        with pytest.raises(jsonschema_rs.ValidationError):
            validate(standard, INFER, "post", answer)
