"""Integers out of their range are refused by the input's name, the range, the value and its place: every way in."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import load_samples
from halfeven.models.errors import BadInput
from halfeven.models.spec.datatypes import Wire, name_of
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.spec.value_range import ValueRange
from halfeven.serve.finetune.data.datasets import read_training
from halfeven.serve.http.codecs.infer import InferCodec
from halfeven.serve.http.codecs.metadata import model_metadata
from halfeven.serve.http.codecs.predict import read_body_of
from halfeven.serve.http.limits.memory_budget import unlimited
from safetensors.numpy import save_file

from tests.serve.http.bodies import npy, npz
from tests.specs import tensor

WORDS = ValueRange((0,), (30521,))
SPEC = ModelSpec(
    "words",
    (tensor("ids", "INT64", -1, 6, range=WORDS),),
    (tensor("logits", "FP32", -1, 4, kind="logits"),),
    8,
)


def v2_json(spec: ModelSpec, ids: np.ndarray) -> None:
    entry = {"name": "ids", "datatype": "INT64", "shape": ids.shape, "data": ids.ravel().tolist()}
    InferCodec(spec).read(json.dumps({"inputs": [entry]}).encode())


def v2_binary(spec: ModelSpec, ids: np.ndarray) -> None:
    """Read two requests with one header: the header is remembered, the numbers are not."""
    entry = {
        "name": "ids",
        "datatype": name_of(ids.dtype),
        "shape": ids.shape,
        "parameters": {"binary_data_size": ids.nbytes},
    }
    head = json.dumps({"inputs": [entry]}).encode()
    codec = InferCodec(spec)
    codec.read(head + np.zeros_like(ids).tobytes(), str(len(head)))
    codec.read(head + ids.tobytes(), str(len(head)))


def v2_raw(spec: ModelSpec, ids: np.ndarray) -> None:
    InferCodec(spec).read(ids[:1].tobytes(), "0")


def predict_json(spec: ModelSpec, ids: np.ndarray) -> None:
    read_body_of(
        spec, "application/json", json.dumps({"instances": ids.tolist()}).encode(), 1 << 20, unlimited()
    )


def predict_npy(spec: ModelSpec, ids: np.ndarray) -> None:
    read_body_of(spec, "", npy(ids), 1 << 20, unlimited())


def predict_npz(spec: ModelSpec, ids: np.ndarray) -> None:
    read_body_of(spec, "", npz(ids=ids), 1 << 20, unlimited())


WAYS = (v2_json, v2_binary, v2_raw, predict_json, predict_npy, predict_npz)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("value", "place"), [(30522, 5), (-1, 0), (2**62, 3)])
def test_a_request_is_refused_by_name_and_range(
    way: Callable[[ModelSpec, np.ndarray], None], value: int, place: int, random: np.random.Generator
) -> None:
    ids = random.integers(0, 30522, (3, 6))
    ids[0, :2] = 0, 30521
    way(SPEC, ids)
    ids[0, place] = value
    with pytest.raises(BadInput) as caught:
        way(SPEC, ids)
    assert str(caught.value) == (
        f"input 'ids' of model 'words': values must lie in 0..30521, got {value} at [0, {place}]"
    )


@pytest.mark.parametrize("way", [v2_binary, v2_raw, predict_npy, predict_npz])
def test_a_bool_whose_byte_is_neither_0_nor_1_is_refused(
    way: Callable[[ModelSpec, np.ndarray], None],
) -> None:
    spec = ModelSpec("words", (tensor("ids", "BOOL", -1, 6),), SPEC.outputs, 8)
    given = np.array([[0, 1, 1, 0, 1, 0]], np.uint8)
    way(spec, given.view(np.bool_))
    given[0, 3] = 255
    with pytest.raises(BadInput) as caught:
        way(spec, given.view(np.bool_))
    assert str(caught.value) == (
        "input 'ids' of model 'words': values must lie in 0..1, got 255 at [0, 3], for they are the bytes of a BOOL"
    )


def test_each_place_of_the_last_axis_may_have_a_range_of_its_own() -> None:
    columns = ValueRange((0, 0, -1, 0, 0, 0), (9, 99, 9, 9, 9, 5))
    spec = ModelSpec("words", (tensor("ids", "INT64", -1, 6, range=columns),), SPEC.outputs, 8)
    ids = np.array([[0, 99, -1, 9, 9, 5], [9, 10, 9, 0, 0, 5]])
    for way in WAYS:
        way(spec, ids)
    ids[0, 2] = 10
    for way in WAYS:
        with pytest.raises(
            BadInput, match=r"values at \[\.\.\., 2\] must lie in -1\.\.9, got 10 at \[0, 2\]"
        ):
            way(spec, ids)


def test_a_smaller_datatype_on_the_wire_is_held_against_the_same_range() -> None:
    small = tensor("ids", "INT64", -1, 2, range=ValueRange((0,), (300,)), wire=Wire("UINT8"))
    spec = ModelSpec("words", (small,), SPEC.outputs, 8).on_the_wire()
    spec.check_values([np.array([[0, 255]], np.uint8)])
    narrow = tensor("ids", "INT64", -1, 2, range=ValueRange((0,), (99,)), wire=Wire("UINT8"))
    with pytest.raises(BadInput, match=r"0\.\.99, got 255"):
        ModelSpec("words", (narrow,), SPEC.outputs, 8).check_values([np.array([[0, 255]], np.uint8)])


def test_empty_and_unbatched_inputs_are_held_against_it_too() -> None:
    SPEC.check_values([np.empty((0, 6), np.int64)])
    columns = tensor("ids", "INT64", 0, 2, range=ValueRange((0, 0), (9, 9)))
    ModelSpec("words", (columns,), SPEC.outputs, 0).check_values([np.empty((0, 2), np.int64)])
    one = ModelSpec("words", (tensor("id", "INT64", range=WORDS),), SPEC.outputs, 0)
    one.check_values([np.array(7)])
    with pytest.raises(BadInput, match=r"got 40000 at \[\]"):
        one.check_values([np.array(40000)])


@pytest.mark.parametrize("kind", ["samples", "training"])
def test_a_file_is_refused_by_tensor_and_row(kind: str, tmp_path: Path, random: np.random.Generator) -> None:
    ids = random.integers(0, 30522, (4, 6))
    arrays = {"ids": ids, "target:logits": random.integers(0, 4, 4)}
    read = load_samples if kind == "samples" else read_training
    save_file(arrays, tmp_path / "file")
    read(tmp_path / "file", SPEC)
    ids[3, 2] = 30522
    save_file(arrays, tmp_path / "file")
    with pytest.raises(BadInput, match=r"tensor 'ids': values must lie in 0\.\.30521, got 30522 at \[3, 2\]"):
        read(tmp_path / "file", SPEC)


def test_a_class_beyond_a_free_number_of_logits_is_refused(
    tmp_path: Path, random: np.random.Generator
) -> None:
    """Cross entropy indexes the logits with it: the same fault."""
    spec = ModelSpec(
        "words",
        (tensor("x", "FP32", -1, "n=1..9"),),
        (tensor("logits", "FP32", -1, "n=1..9", kind="logits"),),
        8,
    )
    arrays = {"x": random.standard_normal((3, 5)).astype(np.float32), "target:logits": np.array([0, 4, 5])}
    save_file(arrays, tmp_path / "file")
    with pytest.raises(BadInput, match=r"target:logits', row 2: expected classes 0\.\.4, got 5"):
        read_training(tmp_path / "file", spec)


def test_the_metadata_say_the_range() -> None:
    spec = ModelSpec("words", (*SPEC.inputs, tensor("mask", "FP32", -1, 6)), SPEC.outputs, 8)
    ids, mask = model_metadata(spec, ["1"], "torch", {})["inputs"]
    assert ids["parameters"] == {"range": "0..30521"} and "parameters" not in mask
