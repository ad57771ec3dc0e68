"""Triton's `qa/L0_http/http_test.py`, case by case, in our words: each test has the name of its model.

`DELIBERATE` has every place where that file asserts something that we do otherwise on purpose.
"""

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.conformance.conftest import LIMIT, Serving, error_of, seen_waiting

FLOATS = "/v2/models/onnx_zero_1_float32/infer"
RAW = {"Inference-Header-Content-Length": "0"}

# case of http_test.py: (what Triton does, what we do, why)
DELIBERATE = {
    "test_byte": (
        "200 for a BYTES model",
        "there is no such model",
        "tensors here are numbers: text is made into tokens on the caller's side",
    ),
    "test_byte_too_many_elements": ("400 for a BYTES model", "there is no such model", "as above"),
    "test_content_encoding_chunked_manually": (
        "200 for a chunked body that also has a Content-Length (as `requests` sends it)",
        "400 for both; 200 for chunked alone",
        "a body with two lengths is how requests are smuggled past a proxy (RFC 9112, 6.3)",
    ),
    "test_negative_dimensions": ("500", "400, the same words", "the caller's mistake is not a server error"),
    "test_loading_large_invalid_model": (
        "400 'request JSON size … exceeds the maximum allowed input size'",
        "413, the same words",
        "413 is the status made for it; the 2 GiB body of the original is one of 2 MiB here",
    ),
    "test_load_oversized_file_parameter": (
        "500 'failed to poll from model repository'",
        "4xx or 501: files are never taken over HTTP",
        "a server that writes strangers' files is how others were broken into",
    ),
    "test_repository_index_deeply_nested_json": (
        "400 \"Invalid value for 'ready': expected a boolean\"",
        "400 that names the depth limit of 100",
        "nothing that deep is parsed at all, on no route",
    ),
}


@pytest.mark.parametrize("count", [8, 32])
def test_raw_binary_and_raw_binary_longer(http: httpx.Client, count: int) -> None:
    sent = np.random.default_rng(count).standard_normal(count, np.float32).tobytes()
    answer = http.post(FLOATS, content=sent, headers=RAW)
    assert answer.status_code == 200, answer.text
    assert answer.content[int(answer.headers["inference-header-content-length"]) :] == sent


@pytest.mark.parametrize("case", ["test_byte", "test_byte_too_many_elements"])
def test_byte_tensors_are_refused_by_name(http: httpx.Client, case: str) -> None:
    text = {"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "data": ["427"]}
    answer = http.post(FLOATS, json={"inputs": [text]})
    assert answer.status_code == 400 and case in DELIBERATE
    assert "BYTES tensors are not offered" in error_of(answer)


def test_multi_variable_dimensions(http: httpx.Client) -> None:
    sent = np.ones((2, 2), np.float16).tobytes()
    answer = http.post("/v2/models/onnx_zero_1_float16/infer", content=sent, headers=RAW)
    assert answer.status_code == 400
    words = "The shape of the raw input 'INPUT0' can not be deduced because there are more than one"
    assert f"{words} variable-sized dimension" in error_of(answer)


def test_multi_inputs(http: httpx.Client) -> None:
    sent = np.arange(24, dtype=np.float32).tobytes()
    answer = http.post("/v2/models/onnx_zero_3_float32/infer", content=sent, headers=RAW)
    assert answer.status_code == 400
    words = "Raw request must only have 1 input (found 1) to be deduced but got 3 inputs in"
    assert words in error_of(answer)


def test_content_encoding_chunked_manually(http: httpx.Client) -> None:
    sent = np.arange(8, dtype=np.float32).tobytes()
    answer = http.post(FLOATS, content=iter([sent[:5], sent[5:]]), headers=RAW)
    assert answer.request.headers["transfer-encoding"] == "chunked" and answer.status_code == 200
    assert answer.content[int(answer.headers["inference-header-content-length"]) :] == sent
    # A body with both lengths is refused in test_framing.py.
    assert "test_content_encoding_chunked_manually" in DELIBERATE


@pytest.mark.parametrize("encoding", ["chunked", "compress", "deflate", "gzip"])
def test_content_encoding_unsupported_client(serving: Serving, encoding: str) -> None:
    given = triton.InferInput("INPUT0", [1, 8], "FP32").set_data_from_numpy(np.ones((1, 8), np.float32))
    with (
        triton.InferenceServerClient(serving.address) as client,
        pytest.raises(InferenceServerException, match="Unsupported HTTP header"),
    ):
        client.infer("onnx_zero_1_float32", [given], headers={"Transfer-Encoding": encoding})


def test_descriptive_status_code(serving: Serving, http: httpx.Client) -> None:
    url, sent = "/v2/models/onnx_zero_1_float32_queue/infer", np.arange(8, dtype=np.float32).tobytes()
    with serving.client() as first, ThreadPoolExecutor(1) as aside:
        waiting = seen_waiting(lambda: aside.submit(first.post, url, content=sent, headers=RAW), http)
        refused = http.post(url, content=sent, headers=RAW)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "onnx_zero_1_float32_queue" in error_of(refused)
        assert waiting.result().status_code == 200


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([2**4, 2**60 + 2], "causes total element count to exceed maximum size of"),
        ([2**2, 2**60 + 2], "byte size overflow for input"),
    ],
)
def test_buffer_size_overflow(http: httpx.Client, shape: list[int], words: str) -> None:
    answer = http.post(FLOATS, json={"inputs": [one_float(shape)]})
    assert answer.status_code == 400
    assert words in error_of(answer)


def one_float(shape: list[int]) -> dict[str, object]:
    return {"name": "INPUT0", "shape": shape, "datatype": "FP32", "data": [1.0]}


def test_negative_dimensions(http: httpx.Client) -> None:
    answer = http.post(FLOATS, json={"inputs": [one_float([2, -5])]})
    assert answer.status_code == 400 and "test_negative_dimensions" in DELIBERATE
    words = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
    assert words in error_of(answer)


def load(http: httpx.Client, model: str, **parameters: str) -> httpx.Response:
    body = json.dumps({"parameters": parameters})
    return http.post(f"/v2/repository/models/{model}/load", content=body)


def test_loading_large_invalid_model(http: httpx.Client) -> None:
    endless = base64.b64encode(bytes(2 * LIMIT)).decode()
    answer = load(http, "invalid_onnx", config='{"backend":"onnxruntime"}', **{"file:1/model.onnx": endless})
    assert answer.status_code == 413 and "test_loading_large_invalid_model" in DELIBERATE
    assert "exceeds the maximum allowed input size" in error_of(answer)


def test_load_oversized_file_parameter(http: httpx.Client) -> None:
    answer = load(http, "onnx_zero_1_float32", config="{}", **{"file:" + "A" * 256: "YQ=="})
    assert answer.status_code in (400, 501) and "test_load_oversized_file_parameter" in DELIBERATE
    assert "file" in error_of(answer)
    assert http.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize(("depth", "status"), [(120, 400), (50, 200)])
def test_json_recursion_depth_limit(http: httpx.Client, depth: int, status: int) -> None:
    data = "[" * depth + "123" + "]" * depth
    text = f'{{"inputs":[{{"name":"INPUT0","datatype":"INT64","shape":[1,1],"data":{data}}}]}}'
    answer = http.post("/v2/models/simple_identity_int64/infer", content=text)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "JSON nesting depth exceeds maximum allowed limit (100)" in error_of(answer)


def test_duplicate_output_names(http: httpx.Client) -> None:
    given = {"name": "INPUT0", "shape": [1, 8], "datatype": "FP32", "data": [list(range(8))]}
    answer = http.post(FLOATS, json={"inputs": [given], "outputs": [{"name": "OUTPUT0"}] * 2})
    assert answer.status_code == 400
    assert "output 'OUTPUT0' already exists in request" in error_of(answer)
    assert http.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize(("depth", "words"), [(250_000, "nesting depth"), (3, "expected a boolean")])
def test_repository_index_deeply_nested_json(http: httpx.Client, depth: int, words: str) -> None:
    body = '{"ready":' + "[" * depth + "true" + "]" * depth + "}"
    answer = http.post("/v2/repository/index", content=body)
    assert answer.status_code == 400 and "test_repository_index_deeply_nested_json" in DELIBERATE
    assert words in error_of(answer)
    assert http.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("length", ["99999999999", "9" * 400, "-1", "0x10", "1e2", "٣", "+5", "5, 5"])
def test_inference_header_content_length_out_of_range(http: httpx.Client, length: str) -> None:
    headers = {b"Inference-Header-Content-Length": length.encode()}
    answer = http.post(FLOATS, content=b'{"inputs":[]}', headers=headers)
    assert answer.status_code == 400
    assert "header" in error_of(answer).lower()
    assert http.get("/v2/health/live").status_code == 200


def test_names_of_the_table_are_cases_of_the_original() -> None:
    assert set(DELIBERATE) <= CASES and len(CASES) == 17


CASES = {
    "test_raw_binary",
    "test_raw_binary_longer",
    "test_byte",
    "test_byte_too_many_elements",
    "test_multi_variable_dimensions",
    "test_multi_inputs",
    "test_content_encoding_chunked_manually",
    "test_content_encoding_unsupported_client",
    "test_descriptive_status_code",
    "test_buffer_size_overflow",
    "test_negative_dimensions",
    "test_loading_large_invalid_model",
    "test_load_oversized_file_parameter",
    "test_json_recursion_depth_limit",
    "test_duplicate_output_names",
    "test_repository_index_deeply_nested_json",
    "test_inference_header_content_length_out_of_range",
}
