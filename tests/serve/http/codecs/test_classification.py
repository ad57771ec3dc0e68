"""The best classes of an output, as tritonclient reads them."""

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.http.codecs.infer import InferCodec
from halfeven.serve.http.codecs.infer_fields import classify
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

X = TensorSpec("x", "FP32", (Dim(), Dim(1, 1)))


def scores(
    datatype: str = "FP32", *sizes: int, labels: tuple[str, ...] = (), rows: bool = True
) -> TensorSpec:
    return TensorSpec(
        "y", datatype, (*([Dim()] if rows else []), *(Dim(n, n) for n in sizes)), "tensor", labels
    )


def ask(
    tensor: TensorSpec, array: np.ndarray, most: Any, binary: bool = False, rows: int = 8, **codec: Any
) -> Any:
    """The response of a model whose output is ``array``, as the body and the length of its head."""
    reader = InferCodec(ModelSpec("m", (X,), (tensor,), rows), **codec)
    entry = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0]}
    output = {"name": "y", "parameters": {"classification": most, "binary_data": binary}}
    request = reader.read(json.dumps({"inputs": [entry], "outputs": [output]}).encode())
    return reader.write(request, [array], "1", {})


def test_the_best_come_first_with_their_value_index_and_label() -> None:
    array = np.array([[0.1, 2.5, -1], [7, 7, 8]], np.float32)
    entry = json.loads(ask(scores("FP32", 3, labels=("ant", "bee", "cat")), array, 2).body)["outputs"][0]
    assert entry == {
        "name": "y",
        "datatype": "BYTES",
        "shape": [2, 2],
        "data": ["2.500000:1:bee", "0.100000:0:ant", "8.000000:2:cat", "7.000000:0:ant"],
    }


@pytest.mark.slow
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9))), st.integers(1, 12))
def test_whatever_the_scores_the_order_is_descending_with_ties_by_index(array: np.ndarray, most: int) -> None:
    shape, texts = classify(array, scores("FP32", array.shape[1]), most, True)
    count = min(most, array.shape[1])
    assert shape == [len(array), count]
    key = np.where(np.isnan(array), -np.inf, array)
    for row, got in zip(key, np.array(texts, object).reshape(shape), strict=True):
        wanted = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
        assert [int(text.split(":")[1]) for text in got] == wanted


@pytest.mark.parametrize(
    ("datatype", "values", "wanted"),
    [
        ("FP16", np.array([[1, 65504]], np.float16), "65504.000000:1"),
        ("BF16", np.array([[1, 3]], ml_dtypes.bfloat16), "3.000000:1"),
        ("FP64", np.array([[1e10, 3]]), "10000000000.000000:0"),
        ("UINT8", np.array([[0, 255]], np.uint8), "255:1"),
        ("INT64", np.array([[2**62, 2**62 + 1]]), "4611686018427387905:1"),
        ("INT8", np.array([[-128, -1]], np.int8), "-1:1"),
    ],
)
def test_every_number_can_be_ranked(datatype: str, values: np.ndarray, wanted: str) -> None:
    assert classify(values, scores(datatype, 2), 1, True) == ([1, 1], [wanted])


def test_a_model_that_is_not_batched_gives_one_axis() -> None:
    tensor = scores("FP32", 2, 2, rows=False)
    array = np.array([[1, 4], [3, 2]], np.float32)
    assert classify(array, tensor, 9, False) == (
        [4],
        ["4.000000:1", "3.000000:2", "2.000000:3", "1.000000:0"],
    )


def test_binary_elements_carry_their_length_before_them() -> None:
    body, head = ask(scores("FP32", 2, labels=("à",)), np.array([[5, 1]], np.float32), 1, binary=True)
    text = "5.000000:0:à".encode()
    assert json.loads(body[:head])["outputs"][0]["parameters"] == {"binary_data_size": 4 + len(text)}
    assert body[head:] == struct.pack("<I", len(text)) + text


def test_a_label_that_says_null_is_text() -> None:
    entry = json.loads(ask(scores("FP32", 1, labels=("null",)), np.ones((1, 1), np.float32), 1).body)
    assert entry["outputs"][0]["data"] == ["1.000000:0:null"] and entry["parameters"] == {}


def test_none_are_asked_with_zero() -> None:
    assert json.loads(ask(scores("FP32", 1), np.ones((1, 1), np.float32), 0).body)["outputs"][0]["data"] == [
        1
    ]


@pytest.mark.parametrize("most", [-1, 1.5, "3", True, 2**31, None])
def test_a_count_that_is_none_is_refused(most: Any) -> None:
    with pytest.raises(BadRequest, match="Unable to parse 'classification' of output 'y'"):
        ask(scores("FP32", 1), np.ones((1, 1), np.float32), most)


def test_what_cannot_be_ranked_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="output 'y' due to unsupported type 'BOOL'"):
        ask(scores("BOOL", 1), np.ones((1, 1), bool), 1)
    with pytest.raises(BadRequest, match="output 'y' due to unsupported type 'FP16'"):
        ask(scores("FP16", 1), np.ones((1, 1), np.float16), 1, as_triton=True)


def test_an_answer_s_size_is_bounded() -> None:
    with pytest.raises(BadRequest, match="65537 classification results; at most 65536"):
        classify(np.zeros((1, 65537), np.float32), scores("FP32", 65537), 2**31 - 1, True)
    with pytest.raises(BadRequest, match="2097153 elements; at most 2097152"):
        classify(np.zeros((1, 2**21 + 1), np.int8), scores("INT8", 2**21 + 1), 1, True)
