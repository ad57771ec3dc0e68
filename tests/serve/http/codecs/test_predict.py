"""Instances in, predictions out: what somebody with curl may rely on."""

import json
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.http.codecs.predict import read_predict, write_predict
from halfeven.serve.http.limits.memory_budget import unlimited

from tests.specs import tensor

X = tensor("x", "FP32", -1, 2, 3)
ONE = ModelSpec("one", (X,), (X,), 4)
TWO = ModelSpec("two", (tensor("ids", "INT64", -1, "n"), tensor("mask", "BOOL", -1, "n")), (X,), 4)
NUMBER = ModelSpec("number", (tensor("x", "FP32"),), (X,), 0)
LABELS = ("ant", "bee", "cat")


def read(spec: ModelSpec, instances: Any) -> list[np.ndarray]:
    return read_predict(spec, json.dumps({"instances": instances}).encode(), unlimited()).arrays


def written(spec: ModelSpec, *outputs: np.ndarray) -> dict[str, Any]:
    return json.loads(write_predict(spec, outputs))


def scoring(kind: str = "logits", **more: Any) -> ModelSpec:
    return ModelSpec("m", (X,), (tensor("scores", "FP32", -1, 3, kind=kind, labels=LABELS),), **more)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_instances_of_one_input_are_its_rows_plain_or_by_name(rows: int) -> None:
    array = np.random.default_rng().standard_normal((rows, 2, 3), np.float32)
    np.testing.assert_array_equal(read(ONE, array.tolist())[0], array)
    np.testing.assert_array_equal(read(ONE, [{"x": row} for row in array.tolist()])[0], array)


def test_the_instances_of_several_inputs_are_objects_by_name() -> None:
    ids, mask = read(TWO, [{"ids": [1, 2], "mask": [True, False]}, {"mask": [True, True], "ids": [3, 4]}])
    np.testing.assert_array_equal(ids, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(mask, [[True, False], [True, True]])
    assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)


def test_a_row_of_one_number_is_a_plain_number() -> None:
    (array,) = read(ModelSpec("m", (tensor("x", "FP64", -1),), (X,), 4), [1.5, 2])
    np.testing.assert_array_equal(array, [1.5, 2])


def test_a_model_that_is_not_batched_takes_one_instance_and_gives_one_prediction() -> None:
    whole = ModelSpec("m", (tensor("x", "FP32", 2, 2),), (tensor("y", "FP32", -1),), 0)
    request = read_predict(whole, b'{"instances": [[[1, 2], [3, 4]]]}', unlimited())
    np.testing.assert_array_equal(request.arrays[0], [[1, 2], [3, 4]])
    assert request.rows == 1
    assert written(whole, np.array([5, 6, 7], np.float32)) == {"predictions": [[5, 6, 7]]}
    number = ModelSpec("m", whole.inputs, (tensor("y", "FP32"),), 0)
    assert written(number, np.array(5, np.float32)) == {"predictions": [5]}
    with pytest.raises(BadRequest, match="at most 1 instances in one request, got 2"):
        read(whole, [[[1, 2], [3, 4]]] * 2)


BAD = {
    "no JSON": (ONE, b"{", "not JSON"),
    "another key": (ONE, b'{"inputs": []}', r'expected {"instances": \[...\]} .* got \[\'inputs\'\]'),
    "a list": (ONE, b"[1]", r'expected {"instances"'),
    "none": (ONE, b'{"instances": []}', "at least one instance, got a list of 0"),
    "too many": (
        ONE,
        json.dumps({"instances": [0] * 5}).encode(),
        "'one' takes at most 4 instances in one request, got 5",
    ),
    "ragged": (
        ONE,
        b'{"instances": [[[1,2,3],[4,5,6]], [[1,2,3]]]}',
        r"input 'x' of model 'one': instances\[1\]: expected a list of 2",
    ),
    "a string": (
        ONE,
        b'{"instances": [[[1,2,3],[4,"5",6]]]}',
        r"instances\[0\]\[1\]\[1\]: expected a number for FP32 .* got \"5\"",
    ),
    "another shape": (
        ONE,
        b'{"instances": [[1,2,3]]}',
        r"input 'x' of model 'one': expected shape \[-1,2,3\], got \[1,3\]",
    ),
    "an unknown name": (
        ONE,
        b'{"instances": [{"y": 1}]}',
        r"instances\[0\]: expected the inputs \['x'\] of model 'one', got \['y'\]",
    ),
    "a missing name": (
        TWO,
        b'{"instances": [{"ids": [1], "mask": [true]}, {"ids": [1]}]}',
        r"instances\[1\]: expected the inputs \['ids', 'mask'\]",
    ),
    "no object": (TWO, b'{"instances": [[1]]}', r"instances\[0\]: expected an object with the inputs"),
    "mixed": (
        ONE,
        b'{"instances": [{"x": [[1,2,3],[4,5,6]]}, [[1,2,3],[4,5,6]]]}',
        r"instances\[1\]: expected an object",
    ),
    "unequal lengths": (TWO, b'{"instances": [{"ids": [1, 2], "mask": [true]}]}', r"axis 1 \(n\)"),
    "two numbers for one": (
        NUMBER,
        b'{"instances": [[1, 2]]}',
        "input 'x' of model 'number': instances: expected one number, got 2",
    ),
    "no number for one": (NUMBER, b'{"instances": [{"x": []}]}', "expected one number, got 0"),
    "a fraction": (
        TWO,
        b'{"instances": [{"ids": [1.5], "mask": [true]}]}',
        r"input 'ids' of model 'two': instances\[0\]\[0\]: expected an integer for INT64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_instances_are_refused_by_place(case: str) -> None:
    spec, body, fault = BAD[case]
    with pytest.raises(BadRequest, match=fault):
        read_predict(spec, body, unlimited())


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16", "INT8", "BOOL"])
def test_one_output_is_a_list_of_its_rows(datatype: str) -> None:
    spec = ModelSpec("m", (X,), (tensor("y", datatype, -1, 2, 2),))
    array = np.random.default_rng().integers(0, 2, (3, 2, 2)).astype(spec.outputs[0].type.numpy)
    assert written(spec, array) == {"predictions": array.tolist()}


def test_several_outputs_are_objects_by_name() -> None:
    spec = ModelSpec("m", (X,), (tensor("total", "FP32", -1), tensor("parts", "INT64", -1, 2)))
    answer = written(spec, np.array([1.5, 2.5], np.float32), np.array([[1, 2], [3, 4]]))
    assert answer == {"predictions": [{"total": 1.5, "parts": [1, 2]}, {"total": 2.5, "parts": [3, 4]}]}


def test_numbers_that_are_not_finite_are_null_alone_and_among_several_outputs() -> None:
    odd = np.array([[np.nan, np.inf, 1]], np.float32)
    assert written(ModelSpec("m", (X,), (X,)), odd) == {"predictions": [[None, None, 1]]}
    spec = ModelSpec("m", (X,), (tensor("a", "FP32", -1), X))
    assert written(spec, np.array([np.nan], np.float32), odd)["predictions"] == [
        {"a": None, "x": [None, None, 1]}
    ]


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_scores_with_labels_stay_numbers_and_the_best_label_is_named_beside_them(kind: str) -> None:
    scores = np.array([[1, 3, 2], [5, 4, 3]], np.float32)
    answer = written(scoring(kind), scores)
    assert answer == {"predictions": scores.tolist(), "labels": ["bee", "ant"]}


def test_a_row_with_a_score_that_is_no_number_has_no_label() -> None:
    assert written(scoring(), np.array([[1, 3, 2], [5, np.nan, 3]], np.float32))["labels"] == ["bee", None]


def test_there_are_no_labels_where_none_belong() -> None:
    none = ModelSpec("none", (X,), (tensor("scores", "FP32", -1, -1, kind="logits"),))
    for spec, shape in (
        (scoring("tensor"), (1, 3)),
        (scoring(), (1, 4)),
        (ONE, (1, 2, 3)),
        (none, (1, 0)),
    ):
        assert "labels" not in written(spec, np.zeros(shape, np.float32))
