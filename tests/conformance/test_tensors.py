"""Triton's curl matrix (`qa/L0_http/test.sh`) and `qa/L0_nan_inf`: what comes back as JSON and what as bytes.

The bodies carry the content type of `curl -d`, which says nothing about what they are.
"""

import json

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.conformance.conftest import SIMPLE, Serving

NUMBERS = list(range(1, 17))
GIVEN = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": NUMBERS} for i in range(2)]
SUM, DIFFERENCE = (np.array(NUMBERS) * 2).tolist(), [0] * 16
CURL = {"content-type": "application/x-www-form-urlencoded"}

# binary_data_output of the request; binary_data of OUTPUT0 and OUTPUT1; which of both come as bytes
MATRIX = [
    (None, None, (False, False)),
    (None, (True, False), (True, False)),
    (None, (True, None), (True, False)),
    (None, (False, False), (False, False)),
    (None, (None, None), (False, False)),
    (True, None, (True, True)),
    (True, (False, None), (False, True)),
    (True, (False, False), (False, False)),
    (False, (None, True), (False, True)),
    (False, None, (False, False)),
]


@pytest.mark.parametrize(("whole", "each", "binary"), MATRIX)
def test_an_output_is_binary_where_it_was_asked_for(http: httpx.Client, whole, each, binary) -> None:
    message: dict[str, object] = {"inputs": GIVEN}
    if whole is not None:
        message["parameters"] = {"binary_data_output": whole}
    if each is not None:
        message["outputs"] = [
            {"name": f"OUTPUT{i}"} | ({} if flag is None else {"parameters": {"binary_data": flag}})
            for i, flag in enumerate(each)
        ]
    answer = http.post(SIMPLE, content=json.dumps(message), headers=CURL)
    assert answer.status_code == 200, answer.text
    head = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    text, tail = answer.content[:head].decode(), answer.content[head:]
    for array, is_binary in zip((SUM, DIFFERENCE), binary, strict=True):
        compact = json.dumps(array, separators=(",", ":"))
        assert (compact in text) == (not is_binary), "arrays are written flat and without spaces"
    wanted = [array for array, is_binary in zip((SUM, DIFFERENCE), binary, strict=True) if is_binary]
    assert tail == np.array(wanted, "<i4").tobytes()
    assert ("inference-header-content-length" in answer.headers) == any(binary)


NAN_INF = [np.nan, np.inf, -np.inf, 1, 2, 3]


def test_nan_and_infinity_come_as_json_that_python_reads(http: httpx.Client) -> None:
    zero = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    answer = http.post("/v2/models/nan_inf_output/infer", content=json.dumps({"inputs": [zero]}))
    assert answer.status_code == 200
    (output,) = answer.json()["outputs"]
    np.testing.assert_array_equal(output["data"], NAN_INF)


def test_nan_and_infinity_come_as_bytes(serving: Serving) -> None:
    given = triton.InferInput("INPUT0", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
    with triton.InferenceServerClient(serving.address) as client:
        result = client.infer("nan_inf_output", [given])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.array(NAN_INF, np.float32))
