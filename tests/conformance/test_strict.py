"""`--triton-strict`: where a client may depend on Triton's own answer, it gets that one. The differences that stay
are in `test_http.py`; here are those that this setting turns back."""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conformance.conftest import COUNTING, LIMIT, ONES, SIMPLE, Serving, error_of, served

HOSTED = ["simple", "onnx_zero_1_float16", "onnx_zero_1_float32"]
HALVES = "/v2/models/onnx_zero_1_float16/infer"


@pytest.fixture(scope="module")
def serving(hosted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    store = tmp_path_factory.mktemp("strict") / "store"
    for name in HOSTED:
        shutil.copytree(hosted / "models" / name, store / "models" / name)
    with served(store, HOSTED, max_body_mib=1, triton_strict="true") as server:
        yield server


def simple(**changed: Any) -> dict[str, Any]:
    return {"inputs": [{**COUNTING, **changed}, ONES]}


def test_an_unknown_model_is_400(http: httpx.Client) -> None:
    answer = http.post("/v2/models/nobody/infer", json=simple())
    assert answer.status_code == 400
    assert error_of(answer).startswith("Request for unknown model: 'nobody' is not found")


def test_a_negative_dimension_is_500(http: httpx.Client) -> None:
    answer = http.post(SIMPLE, json=simple(shape=[1, -16]))
    assert answer.status_code == 500
    assert "attempt to access JSON non-unsigned-integer as unsigned-integer" in error_of(answer)


@pytest.mark.parametrize("count", [15, 18])
def test_data_that_is_not_of_its_shape_is_500(http: httpx.Client, count: int) -> None:
    answer = http.post(SIMPLE, json=simple(data=[1] * count))
    assert answer.status_code == 500
    assert "hape does not match true shape" in error_of(answer)


def test_a_body_above_the_limit_is_400(http: httpx.Client) -> None:
    answer = http.post(SIMPLE, content=bytes(LIMIT + 1))
    assert answer.status_code == 400
    assert "exceeds the maximum allowed input size" in error_of(answer)


def test_more_rows_than_the_largest_batch_are_refused(http: httpx.Client) -> None:
    many = [{**tensor, "shape": [9, 16], "data": [0] * 144} for tensor in (COUNTING, ONES)]
    answer = http.post(SIMPLE, json={"inputs": many})
    assert answer.status_code == 400
    assert "inference request batch-size must be <= 8 for 'simple'" in error_of(answer)


def half(**more: Any) -> dict[str, Any]:
    return {"name": "INPUT0", "shape": [1, 1, 2], "datatype": "FP16", **more}


def test_halves_do_not_come_as_json(http: httpx.Client) -> None:
    answer = http.post(HALVES, json={"inputs": [half(data=[1.0, 2.0])]})
    assert answer.status_code == 400
    assert "receiving FP16 data via JSON is not supported" in error_of(answer)


@pytest.mark.parametrize("binary", [True, False])
def test_halves_do_not_go_as_json(http: httpx.Client, binary: bool) -> None:
    numbers = np.array([1, 2], np.float16).tobytes()
    asked = [{"name": "OUTPUT0", "parameters": {"binary_data": binary}}]
    text = json.dumps({"inputs": [half(parameters={"binary_data_size": 4})], "outputs": asked}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = http.post(HALVES, content=text + numbers, headers=headers)
    if binary:
        assert answer.status_code == 200 and answer.content.endswith(numbers)
    else:
        assert answer.status_code == 400
        assert "sending FP16 data via JSON is not supported" in error_of(answer)


def test_an_answer_is_compressed_for_who_lists_two_codings(http: httpx.Client) -> None:
    headers = {"accept-encoding": "gzip, deflate"}
    request = http.build_request("POST", SIMPLE, json=simple(), headers=headers)
    answer = http.send(request, stream=True)
    body = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["outputs"][0]["data"] == list(range(1, 17))


def test_the_servers_name_is_tritons(http: httpx.Client) -> None:
    assert http.get("/v2").json()["name"] == "triton"
