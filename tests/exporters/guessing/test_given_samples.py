"""A bare ONNX file that does not run with generated inputs is run with those that are given."""

# ruff: noqa: E501  (graphs in their own lines)

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.guessing.given_samples import GivenSamples, judging_samples, laid_out
from halfeven.exporters.guessing.guess import Guess
from halfeven.exporters.guessing.onnx_file import guess_onnx, samples_of_feed
from halfeven.exporters.inputs.samples import read_tensors
from halfeven.models.errors import BadSamples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.manifest import sha256_of
from halfeven.models.store.store import Version
from onnx import ModelProto
from onnx.numpy_helper import to_array

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal

RANDOM = np.random.default_rng(11)
DETECTOR = """g (float[1,3,{0},{0}] image, {1} iou, {1} least) => (int64[k,3] found, float[1,16,4] boxes) {{
    c = Conv<kernel_shape=[8,8],strides=[8,8]>(image, k) f = Reshape(c, rows) s = Sigmoid(f) boxes0, scores = Split<axis=1>(s, parts)
    boxes = Transpose<perm=[0,2,1]>(boxes0) found = NonMaxSuppression(boxes, scores, most, iou, least) }}"""


def detector(sizes: str = "32", thresholds: str = "float[1]") -> ModelProto:
    weights = {"k": normal(RANDOM, 6, 3, 8, 8, scale=0.1), "rows": np.array([0, 6, -1]), "parts": np.array([4, 2]), "most": np.array([9])}  # fmt: skip
    return parsed(DETECTOR.format(sizes, thresholds), weights)


def pictures(count: int, *shape: int) -> np.ndarray:
    return RANDOM.normal(size=(count, *shape)).astype(np.float32)


def with_objects(model: ModelProto, pictures: np.ndarray) -> np.ndarray:
    """The pictures, faint, with one or two patches that the detector scores high and far from all others."""
    kernel = next(to_array(tensor) for tensor in model.graph.initializer if tensor.name == "k")[4]
    faint, patch = 0.1 * pictures, kernel / np.linalg.norm(kernel)
    faint[..., 8:16, 8:16] = 5 * patch
    faint[::2, ..., 16:24, 16:24] = 3 * patch
    return faint


def thresholds(*shape: int) -> dict[str, np.ndarray]:
    return {"iou": np.full(shape, 0.5, np.float32), "least": np.full(shape, 0.9, np.float32)}


def guessed(tmp_path: Path, model: ModelProto, samples: Mapping[str, np.ndarray]) -> Guess:
    onnx.save(model, tmp_path / "net.onnx")
    return guess_onnx(tmp_path / "net.onnx", samples=samples)


CACHED = """g (float[n,1,8] new, float[n,past,8] cache, float[n,total] mask) => (float[n,total] y, float[n,total,8] grown) {
    grown = Concat<axis=1>(cache, new) h = MatMul(grown, w) s = ReduceSum<keepdims=0>(h, last) y = Mul(s, mask) }"""


def test_a_cache_that_is_empty_before_the_first_step_may_be_empty(tmp_path: Path) -> None:
    text = """g (float[n,1,8] new, float[n,past,8] cache) => (float[n,total,8] grown, float[n,1,8] y) {
        grown = Concat<axis=1>(cache, new) y = MatMul(new, w) }"""
    samples = {"new": pictures(6, 1, 8), "cache": np.zeros((6, 0, 8), np.float32)}
    guess = guessed(tmp_path, parsed(text, {"w": normal(RANDOM, 8, 8)}), samples)
    assert [dim.to_json() for dim in guess.spec.inputs[1].shape] == [-1, "past=0..", 8]
    assert any("0 and larger sizes run" in sentence for sentence in guess.sentences)


def test_a_mask_and_a_cache_that_grow_together_are_free_in_both_axes(tmp_path: Path) -> None:
    model = parsed(CACHED, {"w": normal(RANDOM, 8, 8), "last": np.array([2])})
    samples = {"new": pictures(6, 1, 8), "cache": pictures(6, 9, 8), "mask": np.ones((6, 10), np.float32)}
    guess = guessed(tmp_path, model, samples)
    found = {tensor.name: [dim.to_json() for dim in tensor.shape] for tensor in guess.spec.inputs}
    assert found == {"new": [-1, 1, 8], "cache": [-1, "past", 8], "mask": [-1, "total=2.."]}
    assert any("where axis 1 of 'cache' grows as much" in sentence for sentence in guess.sentences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "samples"),
    [
        ("float[1]", {"image": pictures(6, 3, 32, 32), **thresholds(6)}),
        ("float[1]", {"image": pictures(6, 1, 3, 32, 32), **thresholds(6, 1)}),
        ("float", {"image": pictures(6, 3, 32, 32), **thresholds(6)}),
    ],
    ids=["a row each", "whole inputs", "thresholds without axes"],
)
def test_a_detector_that_takes_its_thresholds_goes_from_init_to_a_version(
    axes: str, samples: dict[str, np.ndarray], tmp_path: Path
) -> None:
    model = detector(thresholds=axes)
    onnx.save(model, tmp_path / "net.onnx")
    samples = samples | {"image": with_objects(model, samples["image"])}
    np.savez(tmp_path / "samples.npz", **samples)  # type: ignore[arg-type]
    words = ("init", tmp_path / "net.onnx", tmp_path / "folder", "--samples", tmp_path / "samples.npz")
    code, _, said = run(*words)
    assert code == 0, said
    written = tomllib.loads((tmp_path / "folder/model.toml").read_text())
    assert written["max_batch_size"] == 0 and written["inputs"][0]["shape"] == [1, 3, 32, 32]
    kept = read_tensors(tmp_path / "folder/samples.safetensors")
    assert kept["image"].shape == (6, 1, 3, 32, 32) and kept["iou"].shape == (
        6,
        *([1] if axes == "float[1]" else []),
    )
    for asked in (tmp_path / "folder",), (tmp_path / "net.onnx", "--samples", tmp_path / "samples.npz"):
        code, facts, said = run("convert", *asked, "--store", tmp_path / f"store{len(asked)}")
        assert code == 0 and facts["forms"]["onnx"]["half_nodes"] > 0, said


def test_a_picture_may_have_the_other_sizes_that_run_too(tmp_path: Path) -> None:
    samples = {"image": pictures(2, 1, 3, 64, 64), **thresholds(2, 1)}
    spec = guessed(tmp_path, detector(sizes="?"), samples).spec
    assert not spec.batched and [dim.fixed for dim in spec.inputs[0].shape] == [True, True, False, False]


def test_a_file_with_rows_is_batched_and_its_samples_lie_so(tmp_path: Path) -> None:
    model = parsed("g (float[n,t,8] x) => (float[n,t,4] y) { y = MatMul(x, w) }", {"w": normal(RANDOM, 8, 4)})
    for samples in pictures(5, 7, 8), pictures(5, 1, 7, 8):
        guess = guessed(tmp_path, model, {"x": samples})
        assert guess.spec.batched and [dim.to_json() for dim in guess.spec.inputs[0].shape] == [-1, "t", 8]
        assert guess.samples is not None and guess.samples["x"].shape == (5, 7, 8)


def test_an_input_that_says_a_shape_is_given(tmp_path: Path) -> None:
    model = parsed(
        'g (float[1,3,8,8] x, int64[4] size) => (float[1,3,h,w] y) { y = Resize<mode="linear">(x, "", "", size) }'
    )
    samples: dict[str, Any] = {"x": pictures(4, 1, 3, 8, 8), "size": np.tile([1, 3, 12, 12], (4, 1))}
    spec = guessed(tmp_path, model, samples).spec
    assert not spec.batched and [dim.to_json() for dim in spec.outputs[0].shape][:2] == [1, 3]


@pytest.mark.slow
def test_lengths_that_are_none_are_not_taken_for_lengths(tmp_path: Path) -> None:
    text = "g (float[n,t,8] x, int64[n] x_lens) => (float[n,t,8] y, int64[n] z) { y = Relu(x) z = Identity(x_lens) }"
    lens = np.array([3, 5, 7])
    of = [
        guessed(tmp_path, parsed(text), {"x": pictures(3, 7, 8), "x_lens": times * lens})
        .spec.inputs[1]
        .lengths_of
        for times in (1, 160)
    ]
    assert of == ["t", ""]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({"image": pictures(2, 3, 32, 32)}, r"missing \['iou', 'least'\]"),
        ({"image": pictures(2, 3, 32, 32).astype(np.int32), **thresholds(2)}, "expected datatype FP32, got INT32"),
        ({"image": pictures(2, 3, 16, 32), **thresholds(2)}, r"the sizes \[1, 3, 16, 32\], the file takes \[1,3,32,32\]"),
        ({"image": pictures(2, 3), **thresholds(2)}, "'image': expected 5 axes, samples first"),
        ({"image": pictures(2, 3, 32, 32), **thresholds(3)}, "as many samples of every input"),
        ({"image": pictures(2, 3, 32, 32), "iou": np.full(2, 9, np.float32), "least": np.full(2, 9, np.float32)}, "with the first of the samples given.*iou_threshold must be in range"),
    ],
    ids=["missing", "datatype", "sizes", "axes", "count", "values"],
)  # fmt: skip
def test_samples_that_are_not_the_files_are_refused_by_name(
    samples: dict[str, np.ndarray], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadSamples, match=said):
        guessed(tmp_path, detector(), samples)


def test_a_batch_in_the_files_own_layout_is_known_by_its_sizes() -> None:
    model = parsed("g (float[n,4] x, float[2,n,4] h) => (float[2,n,4] y) { y = Add(h, x) }")
    x, own = RANDOM.normal(size=(5, 4)).astype(np.float32), RANDOM.normal(size=(2, 5, 4)).astype(np.float32)
    rows = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))
    state = TensorSpec("h", "FP32", (Dim(), Dim(2, 2), Dim(4, 4)), batch_axis=1)
    spec = ModelSpec("net", (rows, state), (replace(state, name="y"),), 8)
    for h in (own, own.swapaxes(0, 1)):
        given = GivenSamples.of({"x": x, "h": h}, model.graph.input, {"h": 1})
        np.testing.assert_array_equal(given.rows(5, {"h": 1})["h"], own.swapaxes(0, 1))
        np.testing.assert_array_equal(laid_out({"x": x, "h": h}, spec)["h"], own.swapaxes(0, 1))


def test_beside_a_scalar_a_state_of_one_call_has_its_samples_on_the_files_own_axis() -> None:
    x, own = RANDOM.normal(size=(5, 4)).astype(np.float32), RANDOM.normal(size=(2, 5, 4)).astype(np.float32)
    rows = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))
    state = TensorSpec("h", "FP32", (Dim(2, 2), Dim(), Dim(4, 4)))
    spec = ModelSpec("net", (rows, state, TensorSpec("rate", "FP32", ())), (replace(state, name="y"),), 0)
    found = laid_out({"x": x, "h": own, "rate": np.ones(5, np.float32)}, spec)
    assert found["x"].shape == (5, 1, 4) and found["h"].shape == (5, 2, 1, 4)
    np.testing.assert_array_equal(found["h"][:, :, 0], own.swapaxes(0, 1))


@pytest.mark.parametrize(("rows", "axis"), [(0, 0), (8, 1)], ids=["takes one picture", "has states"])
def test_the_samples_that_made_a_half_judge_it_too(tmp_path: Path, rows: int, axis: int) -> None:
    shape = (Dim(), Dim(2, 2), Dim(4, 4)) if rows else (Dim(1, 1), Dim(2, 2), Dim(4, 4))
    state = TensorSpec("h", "FP32", shape, batch_axis=axis)
    spec = ModelSpec("net", (state,), (replace(state, name="y"),), rows)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    files = {"spec.json": sha256_of(tmp_path / "spec.json"), "original.onnx": ""}
    version = Version("net", 1, tmp_path, {"files": files})
    given = RANDOM.normal(size=(2, 5, 4) if rows else (5, 2, 4)).astype(np.float32)
    np.savez(tmp_path / "x.npz", h=given)
    found = judging_samples(version, tmp_path / "x.npz")
    assert found.all_judge and found.count == 5
    expected = given.swapaxes(0, 1) if rows else given[:, None]
    np.testing.assert_array_equal(found.arrays["h"], expected)
    np.savez(tmp_path / "z.npz", z=given)
    with pytest.raises(BadSamples, match=r"z\.npz: .*missing \['h'\], unknown \['z'\]"):
        judging_samples(version, tmp_path / "z.npz")


@pytest.mark.parametrize(
    ("inputs", "feed", "expected"),
    [
        ("float[n,8] x", {"x": (4, 8)}, {"x": (4, 8)}),
        ("float[1,8] x", {"x": (4, 8)}, {"x": (4, 8)}),
        ("float[4,8] x", {"x": (4, 8)}, {"x": (1, 4, 8)}),
        ("float[4,8] x", {"x": (3, 4, 8)}, {"x": (3, 4, 8)}),
        ("float[8] x", {"x": (8,)}, {"x": (1, 8)}),
        ("float[n,8] x, float s", {"x": (4, 8), "s": ()}, {"x": (4, 8), "s": (4,)}),
        ("float[4,8] x, float s", {"x": (4, 8), "s": ()}, {"x": (1, 4, 8), "s": (1,)}),
        ("float[n,8] x, float[1] s", {"x": (4, 8), "s": (1,)}, {"x": (1, 4, 8), "s": (1, 1)}),
        ("float[4,8] x", {"x": (5, 8)}, {"x": (5, 8)}),
        ("float[4,8] x", {"z": (4, 8)}, {"z": (4, 8)}),
    ],
)
def test_a_feed_gives_its_rows_as_samples_or_is_one_sample_where_the_file_takes_no_rows(
    inputs: str, feed: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    model = parsed(f"g ({inputs}) => (float y) {{ y = ReduceSum<keepdims=0>(x) }}")
    arrays = {name: np.asarray(RANDOM.normal(size=shape), np.float32) for name, shape in feed.items()}
    samples = samples_of_feed(model.graph, arrays)
    assert {name: array.shape for name, array in samples.items()} == expected
    for name, array in samples.items():
        np.testing.assert_array_equal(array, np.broadcast_to(arrays[name], array.shape))
