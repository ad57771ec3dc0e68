"""A Fourier transform as a product answers as ONNX Runtime's transform, and as numpy's in FP64."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.exporters.exported.rewritten_files import Array, File, drawn, is_rewritten


def transform(
    folder: Path,
    x: Array,
    axis: int,
    length: int | None = None,
    inverse: bool = False,
    onesided: bool = False,
    opset: int = 20,
    type_: str = "float",
) -> File:
    """A DFT of ``x``, whose first size is free."""
    named = f"inverse={inverse:d}, onesided={onesided:d}" + (f", axis={axis}" if opset < 20 else "")
    constants = [f"int64 length = {{{length}}}"] if length else []
    given = ["x", "length" if length else "", "" if opset < 20 else "axis"]
    constants += [] if opset < 20 else [f"int64 axis = {{{axis}}}"]
    given = given if given[2] else [name for name in given if name]
    held = f"<{', '.join(constants)}>" if constants else ""
    sizes = ",".join(map(str, ("rows", *x.shape[1:])))
    free = ",".join(f"y{place}" for place in range(x.ndim))
    text = (
        f"main ({type_}[{sizes}] x) => ({type_}[{free}] y) {held} {{ y = DFT<{named}>({', '.join(given)}) }}"
    )
    return File(folder, text, opset)


def by_numpy(x: Array, axis: int, length: int | None, inverse: bool, onesided: bool) -> Array:
    axis %= x.ndim
    signal = x[..., 0].astype(np.float64) + (1j * x[..., 1].astype(np.float64) if x.shape[-1] == 2 else 0)
    if inverse and onesided:
        return np.fft.irfft(signal, length, axis)[..., None]
    if onesided:
        came = np.fft.rfft(signal.real, length, axis)
    else:
        came = (np.fft.ifft if inverse else np.fft.fft)(signal, length, axis)
    return np.stack([came.real, came.imag], -1)


KINDS = {  # parts of the input, inverse, onesided
    "real": (1, False, False), "complex": (2, False, False), "real, inverse": (1, True, False),
    "complex, inverse": (2, True, False), "onesided": (1, False, True), "onesided, inverse": (2, True, True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [1, 2, -2])
def test_it_answers_as_onnx_runtimes_transform_and_as_numpys_in_double(
    kind: str, axis: int, opset: int, tmp_path: Path, random: np.random.Generator
) -> None:
    parts, inverse, onesided = KINDS[kind]
    if inverse and onesided:
        cases = [(5, None), (5, 8), (5, 9), (1, 1), (2, 2)]  # 5 numbers are half a spectrum of 8, and of 9
    else:
        cases = list(product([5, 8], [None, 5, 6, 12]))  # shorter and longer than the axis
    for (size, length), rows in product(cases, [1, 3]):
        shape = [rows, 4, 6, parts]
        shape[axis] = size
        x = drawn(random, shape)
        file = transform(tmp_path, x, axis, length, inverse, onesided, opset)
        before = file.answer({"x": x})
        assert is_rewritten(file.rewrite({"x": x}, 8)) and "DFT" not in file.operations
        after, exact = file.answer({"x": x}), by_numpy(x, axis, length, inverse, onesided)
        assert after.dtype == before.dtype and after.shape == before.shape == exact.shape
        scale = np.abs(exact).max()
        assert np.abs(after - exact).max() < 1e-6 * scale
        assert np.abs(after - before).max() < 1e-4 * scale, "ONNX Runtime's own error where lengths are odd"


def test_one_line_alone_is_transformed_along_its_first_axis(
    tmp_path: Path, random: np.random.Generator
) -> None:
    x = drawn(random, (7, 2))
    file = File(
        tmp_path, "main (float[7,2] x) => (float[7,2] y) <int64 axis = {0}> { y = DFT(x, , axis) }", 20
    )
    assert is_rewritten(file.rewrite({"x": x}))
    assert np.allclose(file.answer({"x": x}), by_numpy(x, 0, None, False, False), atol=1e-5)


@pytest.mark.parametrize(("opset", "axis"), [(17, 1), (20, 2)])
def test_without_an_axis_it_is_the_one_of_the_opset(
    opset: int, axis: int, tmp_path: Path, random: np.random.Generator
) -> None:
    x = drawn(random, (3, 4, 6, 2))
    file = File(tmp_path, "main (float[n,4,6,2] x) => (float[n,4,6,2] y) { y = DFT(x) }", opset)
    before = file.answer({"x": x})
    assert is_rewritten(file.rewrite({"x": x}, 8))
    assert np.allclose(file.answer({"x": x}), before, atol=1e-5)
    assert np.allclose(before, by_numpy(x, axis, None, False, False), atol=1e-5)


@pytest.mark.parametrize(("type_", "error"), [("float16", 2**-11), ("bfloat16", 2**-8), ("double", 2**-44)])
def test_it_keeps_the_datatype_and_a_half_is_rounded_once(
    type_: str, error: float, tmp_path: Path, random: np.random.Generator
) -> None:
    """ONNX Runtime transforms no halves."""
    x = drawn(random, (3, 16, 1), type_)
    file = transform(tmp_path, x, 1, onesided=True, type_=type_)
    assert is_rewritten(file.rewrite({"x": x}, 8))
    graph = onnx.load(file.path).graph
    matrices = [tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 2]
    assert matrices == [onnx.TensorProto.DOUBLE if type_ == "double" else onnx.TensorProto.FLOAT]
    assert graph.output[0].type.tensor_type.elem_type == onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    if type_ != "bfloat16":  # which ONNX Runtime's CPU computes little of
        came, exact = file.answer({"x": x}), by_numpy(x, 1, None, False, True)
        assert came.dtype == x.dtype
        assert np.all(np.abs(came - exact) <= error * (np.abs(exact) + 0.1))
        assert not came[:, [0, 8], 1].any(), "exactly real, as of a transform"


LEFT = {
    "(float[n,m,1] x) => (float[n,m,2] y) <int64 a={1}> {y = DFT(x, , a)}": "its length is not",
    "(float[n,8,1] x) => (float[b,c,2] y) <int64 a={1}> {s = Shape<end=1>(x) k = Squeeze(s) y = DFT(x, k, a)}":
        "its length is not",
    "(float[n,8,1] x, int64 a) => (float[b,c,2] y) {y = DFT(x, , a)}": "its axis",
    "(float[n,8,2] x) => (float[n,c,1] y) <int64 a={1}, int64 l={8}> {y = DFT<inverse=1, onesided=1>(x, l, a)}":
        "its spectrum has 8 numbers, where a length of 8 has 5",
    "(float[n,4096,1] x) => (float[n,c,2] y) <int64 a={1}> {y = DFT(x, , a)}": "its matrix would have up to 33554432",
}  # fmt: skip


@pytest.mark.parametrize("graph", LEFT)
def test_one_that_is_not_rewritten_is_named_and_the_file_is_not_touched(graph: str, tmp_path: Path) -> None:
    file = File(tmp_path, f"main {graph}", 20)
    before = file.path.read_bytes()
    (found,) = file.rewrite({"x": np.zeros((2, 8, 1), np.float32)}, 8)
    assert (found.output, found.operation) == ("y", "DFT") and LEFT[graph] in found.left_because
    assert file.path.read_bytes() == before
