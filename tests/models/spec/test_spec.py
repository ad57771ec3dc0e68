"""Specs: dimensions are read strictly, arrays are held against them, JSON keeps everything."""

import json
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from halfeven.models.errors import BadFolder, BadRequest, BadSamples
from halfeven.models.spec.datatypes import DATATYPES, name_of
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, ParityLimits, TensorSpec


def spec(*inputs: TensorSpec, rows: int = 8) -> ModelSpec:
    return ModelSpec("net", inputs, (TensorSpec("y", "FP32", (Dim(), Dim(3, 3))),), max_batch_size=rows)


def tensor(name: str, *shape: int | str, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, datatype, tuple(Dim.parse(item) for item in shape))


@pytest.mark.parametrize(
    ("written", "dim"),
    [
        (8, Dim(8, 8)),
        (0, Dim(0, 0)),
        (-1, Dim()),
        ("1..512", Dim(1, 512)),
        ("3..", Dim(3, None)),
        ("length", Dim(name="length")),
        ("length=2..512", Dim(2, 512, "length")),
        ("length=2..", Dim(2, None, "length")),
    ],
)
def test_a_dimension_is_read_and_written_back_the_same(written: int | str, dim: Dim) -> None:
    assert Dim.parse(written) == dim
    assert dim.to_json() == written


@pytest.mark.parametrize(
    "wrong", [-2, 1.5, True, "", "5..2", "..5", "length=", "a b", "1..2..3", "length\n", None, [1]]
)
def test_what_is_no_dimension_is_refused_with_what_one_looks_like(wrong: Any) -> None:
    with pytest.raises(BadFolder, match="length=2"):
        Dim.parse(wrong)


def test_a_fixed_dimension_is_its_size_on_the_wire_and_a_free_one_is_minus_1() -> None:
    assert tensor("x", -1, 3, "1..9", "length").wire_shape == [-1, 3, -1, -1]


@pytest.mark.parametrize("name", DATATYPES)
def test_every_datatype_is_the_same_in_numpy_and_torch(name: str) -> None:
    datatype = DATATYPES[name]
    assert datatype.itemsize == datatype.torch.itemsize
    assert name_of(datatype.numpy) == name_of(datatype.numpy.newbyteorder(">")) == name


def test_bfloat16_is_a_float_and_a_dtype_without_a_wire_name_keeps_its_own() -> None:
    assert name_of(np.dtype(ml_dtypes.bfloat16)) == "BF16" and DATATYPES["BF16"].is_float
    assert name_of(np.dtype(np.complex64)) == "complex64"


def test_arrays_that_fit_give_the_number_of_rows() -> None:
    model = spec(tensor("x", -1, "length", 2), tensor("mask", -1, "length", datatype="INT64"))
    arrays = {"x": np.zeros((5, 7, 2), np.float32), "mask": np.zeros((5, 7), np.int64)}
    assert model.check_inputs(arrays) == 5
    assert spec(tensor("x", 3), rows=0).check_inputs({"x": np.zeros(3, np.float32)}) == 1


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3), np.float32), ["'x'", "[-1,4]", "[2,3]"]),
        (np.zeros((2, 4, 1), np.float32), ["'x'", "[-1,4]", "[2,4,1]"]),
        (np.zeros((2, 4), np.float64), ["'x'", "FP32", "FP64"]),
        (np.zeros((0, 4), np.float32), ["'x'", "[-1,4]", "[0,4]"]),
    ],
)
def test_an_array_that_does_not_fit_is_named_with_what_was_expected_and_what_came(
    array: np.ndarray, words: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        spec(tensor("x", -1, 4)).check_inputs({"x": array})
    assert all(word in str(caught.value) for word in words), caught.value


def test_bounds_are_held_at_both_ends() -> None:
    bounded = tensor("x", -1, "2..3")
    faults = [bounded.fault((1, size), "FP32") for size in (1, 2, 3, 4)]
    assert [fault is None for fault in faults] == [False, True, True, False]
    assert "2..3" in str(faults[0])


def test_unequal_batches_and_unequal_named_dimensions_are_refused_with_both_inputs() -> None:
    model = spec(tensor("x", -1, "length"), tensor("mask", -1, "length"))
    for shape in ((2, 5), (3, 4)):
        arrays = {"x": np.zeros((2, 4), np.float32), "mask": np.zeros(shape, np.float32)}
        with pytest.raises(BadRequest, match=r"'mask'.*'x'"):
            model.check_inputs(arrays)


def test_missing_and_unknown_names_are_told_in_the_error_that_was_asked_for() -> None:
    with pytest.raises(BadSamples, match="expected 'x', got 'z'"):
        spec(tensor("x", -1)).check_inputs({"z": np.zeros(1, np.float32)}, BadSamples)
    with pytest.raises(BadRequest, match="expected 1 inputs but got 2"):
        spec(tensor("x", -1)).check_inputs({"x": np.zeros(1, np.float32), "z": np.zeros(1)})


def test_a_spec_is_the_same_after_json() -> None:
    picture = {"size": [8, 8], "color": "L", "scale": 0.5}
    model = ModelSpec(
        "net",
        (
            TensorSpec("image", "FP32", (Dim(), Dim(1, 1), Dim(8, 8), Dim(8, 8)), picture=picture),
            TensorSpec("length", "INT64", (Dim(), Dim(3, None, "length"))),
        ),
        (TensorSpec("y", "BF16", (Dim(), Dim(2, 2)), "logits", ("no", "yes")),),
        max_batch_size=0,
        form="onnx",
        parity=ParityLimits(8.0, 40.0, 20.0, 0.1, overridden=("max_error_u",)),
        batching=Batching(100, 7, (1, 4), 5, 6, 7, 8, 9),
    )
    assert ModelSpec.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_a_spec_written_before_there_were_buckets_is_read() -> None:
    old = json.loads(json.dumps(spec(tensor("x", -1, 4)).to_json()))
    assert old["batching"].pop("buckets") == "auto"
    assert ModelSpec.from_json(old).batching == Batching()
    old["batching"] = {"max_queue_delay_us": 0, "max_queue_size": 1024}  # as the first version wrote it
    assert ModelSpec.from_json(old).batching == Batching()
    old["batching"]["buckets"] = []
    assert ModelSpec.from_json(old).batching.buckets == ()


def test_a_request_may_have_sixteen_batches_of_rows_or_what_the_model_says() -> None:
    model = spec(tensor("x", -1, 4)).with_max_batch_size(8)
    assert model.max_request_rows == 128
    said = replace(model, batching=Batching(max_request_rows=20))
    assert (said.max_request_rows, said.with_max_batch_size(64).max_request_rows) == (20, 64)


def test_the_signature_is_what_callers_rely_on_and_no_more() -> None:
    model = spec(tensor("x", -1, "1..9"))
    assert model.signature() == spec(tensor("x", -1, "length"), rows=3).signature()
    assert model.signature() != spec(tensor("x", -1, 9)).signature()
    assert model.signature() != spec(tensor("x", -1, "1..9", datatype="FP64")).signature()
    assert model.signature() != spec(tensor("x", -1, "1..9"), rows=0).signature()
    assert model.signature() != spec(tensor("z", -1, "1..9")).signature()
