"""schemathesis over our OpenAPI document: hundreds of requests made from it, none of which is our fault.

The document is the server's own. Into a copy go the names of models that exist (random names only ever meet 404)
and what the bodies of the hot routes look like, so that the requests reach what lies behind the first refusal.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest
import tritonclient.http as triton

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving
from tests.patience import PATIENCE_S
from tests.slow import EVERY_CASE

CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "4xx", 501, 503]\n'  # these two have words
CHANGES_WHAT_IS_SERVED = re.compile("/(load|unload|rollback|promote|canary|shadow)$")
KNOWN = {"m": ["simple", "onnx_zero_1_float32", "ranked", "nobody"], "v": ["1", "2", "01", "x"]}

SCALAR = {"type": ["string", "number", "boolean"]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "binary_data": {"type": "boolean"},
        "binary_data_size": {"type": "integer"},
        "binary_data_output": {"type": "boolean"},
        "classification": {"type": ["integer", "boolean", "string"]},
        "priority": {"type": "integer"},
        "timeout": {"type": "integer"},
    },
    "additionalProperties": SCALAR,
}
NESTED: dict[str, Any] = {"type": "array", "items": {"type": "number"}, "maxItems": 20}
TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"enum": ["INPUT0", "INPUT1"]},
        "shape": {"type": "array", "items": {"enum": [0, 1, 2, 6, 16, 2**32, 2**63]}, "maxItems": 4},
        "datatype": {"enum": ["INT32", "FP32", "FP16", "BYTES"]},
        "data": {"anyOf": [NESTED, {"type": "array", "items": NESTED, "maxItems": 3}]},
        "parameters": PARAMETERS,
    },
}
OUTPUT = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"enum": ["OUTPUT0", "OUTPUT1"]}, "parameters": PARAMETERS},
}


def infer_body(inputs: dict[str, Any]) -> dict[str, Any]:
    outputs = {"type": "array", "maxItems": 2, "items": OUTPUT}
    parts = {"id": {"type": "string"}, "inputs": inputs, "outputs": outputs, "parameters": PARAMETERS}
    return {"type": "object", "required": ["inputs"], "properties": parts}


# Bodies with inputs that are good for `simple`, so that the code behind the inputs is reached, and with others.
GOOD_INPUTS = {"enum": [[COUNTING, ONES]]}
ANY_INPUTS = {"type": "array", "items": TENSOR, "minItems": 1, "maxItems": 3}
INFER = {"anyOf": [infer_body(GOOD_INPUTS), infer_body(ANY_INPUTS)]}
PREDICT = {
    "type": "object",
    "required": ["instances"],
    "properties": {
        "instances": {"type": "array", "items": {"anyOf": [NESTED, {"type": "object"}]}, "maxItems": 3}
    },
}
BODIES = {"/infer": INFER, ":predict": PREDICT, "/repository/index": {"properties": {"ready": {}}}}


def reaching(document: dict[str, Any]) -> dict[str, Any]:
    """The document with names that exist, and bodies for the routes that read them raw."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in KNOWN:
                    harmless = not CHANGES_WHAT_IS_SERVED.search(path)
                    parameter["schema"] = {"enum": KNOWN[parameter["name"]] if harmless else ["nobody"]}
        for ending, schema in BODIES.items():
            if path.endswith(ending):
                operations["post"]["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return document


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    return http.get("/openapi.json").json()


def test_the_document_has_the_routes_that_clients_know(document: dict[str, Any]) -> None:
    assert {"/v2", "/v2/health/ready", "/v2/models/{m}/infer", "/v2/repository/index"} <= set(
        document["paths"]
    )


def validators(document: dict[str, Any]) -> tuple[Any, Any]:
    """The validators of the infer route's request and of its answer, as the document has them."""
    infer = document["paths"]["/v2/models/{m}/infer"]["post"]
    bodies = infer["requestBody"], infer["responses"]["200"]
    taken, given = [jsonschema_rs.validator_for(b["content"]["application/json"]["schema"]) for b in bodies]
    return taken, given


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
@pytest.mark.parametrize("classes", [0, 2])
def test_what_tritons_client_sends_and_gets_is_what_the_document_says(
    http: httpx.Client, document: Any, binary_in: bool, binary_out: bool, classes: int
) -> None:
    taken, given = validators(document)
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for one in inputs:
        one.set_data_from_numpy(np.random.default_rng().integers(0, 99, (1, 16), np.int32), binary_in)
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_out, classes)]
    body, head = triton.InferenceServerClient.generate_request_body(
        inputs, outputs, request_id="me", priority=1, timeout=10**6, parameters={"mine": "own"}
    )
    taken.validate(json.loads(body[:head] if head is not None else body))
    headers = {} if head is None else {"Inference-Header-Content-Length": str(head)}
    answer = http.post(SIMPLE, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    length = answer.headers.get("inference-header-content-length")
    assert (length is not None) == binary_out
    given.validate(json.loads(answer.content[: int(length)] if length else answer.content))


WRONG: dict[str, dict[str, Any]] = {
    "no inputs": {},
    "no tensor among them": {"inputs": []},
    "a negative size": {"inputs": [{**COUNTING, "shape": [-1, 16]}, ONES]},
    "an unknown datatype": {"inputs": [{**COUNTING, "datatype": "FP8"}, ONES]},
    "no name": {"inputs": [{key: COUNTING[key] for key in ("shape", "datatype", "data")}, ONES]},
    "parameters within parameters": {"inputs": [COUNTING, ONES], "parameters": {"mine": {"own": 1}}},
    "a text for a priority": {"inputs": [COUNTING, ONES], "parameters": {"priority": "high"}},
    "a number for an id": {"id": 7, "inputs": [COUNTING, ONES]},
    "an output without a name": {"inputs": [COUNTING, ONES], "outputs": [{"parameters": {}}]},
    "a word that nan_as does not know": {"inputs": [COUNTING, ONES], "parameters": {"nan_as": "zero"}},
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG)
def test_what_the_document_forbids_is_refused(
    http: httpx.Client, document: Any, message: dict[str, Any]
) -> None:
    taken, _ = validators(document)
    assert taken.is_valid({"inputs": [COUNTING, ONES]})
    assert not taken.is_valid(message)
    assert http.post(SIMPLE, json=message).status_code == 400


@pytest.mark.slow
def test_schemathesis_finds_no_fault_of_ours(serving: Serving, document: Any, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_text(json.dumps(reaching(document)))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [Path(sys.executable).with_name("schemathesis"), "run", "openapi.json"]
    options = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing"]
    options += ["--max-examples", "15" if EVERY_CASE else "6"]
    done = subprocess.run(
        [
            *command,
            "--url",
            f"http://{serving.address}",
            *options,
            "--generation-deterministic",
            "--no-color",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    generated = re.search(r"([\d,]+) generated", done.stdout)
    assert generated and int(generated[1].replace(",", "")) > 120, done.stdout
