"""A difference counts in every part of a tensor, in every sample that is asked, in large numbers and in integers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.differing import diff
from halfeven.exporters.differing.onnx_side import OnnxSide

from tests.exporters.onnx.onnx_files import parsed

WEIGHT = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def rows_of(count: int, width: int = 8) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, width)).astype(np.float32)


def file_of(path: Path, text: str, **weights: np.ndarray | np.generic) -> Path:
    onnx.save(parsed(text, {name: np.asarray(array) for name, array in weights.items()}), path)
    return path


def compared(a: Path, b: Path, x: np.ndarray, out: Path | None = None) -> Any:
    samples = a.with_name("x.npz")
    np.savez(samples, x=x)
    return diff.differences(OnnxSide(a), OnnxSide(b), samples, out=out)


@pytest.mark.parametrize("batch", ["1", "2", "3", "4", "n"])
@pytest.mark.parametrize("row", [*range(4), *range(60, 64)])
def test_each_of_the_first_four_and_the_last_four_samples_is_compared(
    tmp_path: Path, row: int, batch: str
) -> None:
    text = f"g (float[{batch},8] x) => (float[{batch},8] y) {{ y = Clip(x, low, high) }}"
    a, b = (
        file_of(tmp_path / f"{name}.onnx", text, low=np.float32(-1e6), high=np.float32(high))
        for name, high in (("a", 1e6), ("b", 5))
    )
    x = np.zeros((64, 8), np.float32)
    x[:, 0] = 1
    assert compared(a, b, x)["equal"]
    x[row] = 50
    assert compared(a, b, x)["first"]["tensor"] == "y"


def test_each_sample_of_a_file_that_is_not_batched_is_compared(tmp_path: Path) -> None:
    text = "g (float[8] x) => (float[8] y) { y = Clip(x, low, high) }"
    a, b = (
        file_of(tmp_path / f"{name}.onnx", text, low=np.float32(-1e6), high=np.float32(high))
        for name, high in (("a", 1e6), ("b", 5))
    )
    x = np.ones((6, 8), np.float32)
    assert compared(a, b, x)["equal"]
    x[1] = 50
    assert compared(a, b, x)["first"]["tensor"] == "y"


COLUMNS = """g (float[n,8] x) => (float[n,8] y) {
    h = MatMul(x, w) s = Sigmoid(h) p = Mul(s, by) y = Identity(p)
}"""
HALF_COLUMNS = """g (float[n,8] x) => (float[n,8] y) {
    xh = Cast<to = 10>(x) h = MatMul(xh, w) s = Sigmoid(h) p = Mul(s, by) y = Cast<to = 1>(p)
}"""


def columns(
    folder: Path,
    large: float,
    small: float,
    inner: str = "hsp",
    half: bool = False,
    last: float | None = None,
) -> Path:
    """A file whose first four columns are ``large`` and the others ``small``; ``inner``: the names of its tensors."""
    by = np.array([large] * 4 + [small] * 3 + [small if last is None else last])
    text = HALF_COLUMNS if half else COLUMNS
    for old, new in zip("hsp", inner, strict=True):
        text = text.replace(f" {old} =", f" {new} =").replace(f"({old}", f"({new}")
    dtype = np.float16 if half else np.float32
    return file_of(
        folder / f"{len([*folder.iterdir()])}.onnx", text, w=WEIGHT.astype(dtype), by=by.astype(dtype)
    )


@pytest.mark.parametrize("inner", ["hsp", "ijk"], ids=["inner tensors", "outputs alone"])
@pytest.mark.parametrize(
    ("large", "other", "last", "half"),
    [
        (640.0, 0.01, 0.01, True),
        (2000.0, 1.0, -1.0, True),
        (640.0, 1.0, 1.5, True),
        (8e5, -1.0, -1.0, False),
        (2e5, 1.0, 1.3, False),
        (2e5, 1.0, 0.5, False),
    ],
)
def test_a_wrong_column_beside_larger_ones_is_a_difference(
    tmp_path: Path, inner: str, large: float, other: float, last: float, half: bool
) -> None:
    x = rows_of(32)
    a = columns(tmp_path, large, 1.0)
    facts = compared(a, columns(tmp_path, large, other, inner, half, last), x)
    assert facts["first"]["tensor"] == ("p" if inner == "hsp" else "y")
    axis, place = facts["first"]["part"]
    assert axis == 1 and place >= (4 if other != 1 else 7)
    assert facts["first"]["error"] > facts["first"]["explained"]


@pytest.mark.parametrize("inner", ["hsp", "ijk"], ids=["inner tensors", "outputs alone"])
@pytest.mark.parametrize("small", [1.0, 1e-2, 1e-4, 1e-6])
def test_small_columns_of_an_honest_half_are_no_difference(tmp_path: Path, inner: str, small: float) -> None:
    """FP16 does not hold the smallest of them."""
    x = rows_of(32)
    a = columns(tmp_path, 640.0, small)
    assert compared(a, columns(tmp_path, 640.0, small, inner, half=True), x)["equal"]


def test_a_wrong_sample_beside_larger_ones_is_a_difference(tmp_path: Path) -> None:
    text = "g (float[n,8] x) => (float[n,8] y) {{ y = {} }}"
    a = file_of(tmp_path / "a.onnx", text.format("Identity(x)"))
    b = file_of(tmp_path / "b.onnx", text.format("Shrink<lambd = 2.0, bias = 0.0>(x)"))
    x = np.full((4, 8), 5e5, np.float32)
    assert compared(a, b, x)["equal"]
    x[2] = 1
    assert compared(a, b, x)["first"]["part"] == [0, 2]


LARGE = "g (float[n,4] x) => (float[n,4] y) { size = Abs(x) more = Add(size, one) y = Mul(more, by) }"


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_large_numbers_that_vary_are_compared(tmp_path: Path, rows: int) -> None:
    x = rows_of(rows, 4)
    a, b = (
        file_of(tmp_path / f"{name}.onnx", LARGE, one=np.float32(1), by=np.float32(by))
        for name, by in (("a", 2e9), ("b", 2e5))
    )
    assert compared(a, a, x)["equal"]
    assert compared(a, b, x)["first"]["tensor"] == "y"


def test_a_mask_of_another_size_is_no_difference(tmp_path: Path) -> None:
    """Scores are added to its numbers, so they are not all the same."""
    text = "g (float[n,8] x) => (float[n,8] y) { y = Add(x, mask) }"
    a, b = (
        file_of(
            tmp_path / f"{name}.onnx",
            text,
            mask=np.where(np.arange(8) % 2, np.float32(0), np.float32(size)).astype(np.float32),
        )
        for name, size in (("a", -1e9), ("b", -65504.0))
    )
    assert compared(a, b, rows_of(32))["equal"]


WHOLE = "g (float[n,8] x) => (int64[n,8] y) {{ {} t = Mul(h, ten) {} y = Cast<to = 7>({}) }}"


def whole(path: Path, half: bool, clipped: float | None = None, read: str = "t") -> Path:
    dtype = np.float16 if half else np.float32
    start = "xh = Cast<to = 10>(x) h = MatMul(xh, w)" if half else "h = MatMul(x, w)"
    cut = "" if clipped is None else "c = Clip(t, low, high)"
    weights = {"w": WEIGHT.astype(dtype), "ten": np.array(10, dtype)}
    if clipped is not None:
        weights |= {"low": np.array(-clipped, dtype), "high": np.array(clipped, dtype)}
    return file_of(path, WHOLE.format(start, cut, read if clipped is None else "c"), **weights)


def test_an_integer_of_a_half_differs_by_no_more_than_a_near_tie(tmp_path: Path) -> None:
    x = rows_of(64)
    a = whole(tmp_path / "a.onnx", half=False)
    assert compared(a, whole(tmp_path / "b.onnx", half=True), x)["equal"]
    largest = np.sort(np.abs(x[[*range(4), *range(60, 64)]] @ WEIGHT * 10).max(axis=1))[-1]
    clipped = compared(a, whole(tmp_path / "c.onnx", half=True, clipped=round(float(largest)) - 6), x)
    assert clipped["first"]["tensor"] == "y" and clipped["first"]["error"] is None


def test_an_index_whose_scores_tie_in_half_is_no_difference(tmp_path: Path) -> None:
    text = "g (float[n,8] x) => (int64[n] y) {{ {} y = ArgMax<axis = 1, keepdims = 0>(s) }}"
    a = file_of(tmp_path / "a.onnx", text.format("s = Identity(x)"))
    b = file_of(tmp_path / "b.onnx", text.format("h = Cast<to = 10>(x) s = Cast<to = 1>(h)"))
    odd = file_of(
        tmp_path / "odd.onnx",
        "g (float[n,8] x) => (int64[n] y) { m = Neg(x) y = ArgMax<axis=1, keepdims=0>(m) }",
    )
    x = np.zeros((4, 8), np.float32)
    x[:, 0], x[:, 5] = 1, 1 + 2.0**-13
    assert OnnxSide(a).tensors({"x": x})["y"].tolist() != OnnxSide(b).tensors({"x": x})["y"].tolist()
    assert compared(a, b, x)["equal"]
    assert compared(a, odd, x)["first"]["tensor"] == "y"


def test_an_output_that_is_a_weight_or_an_input_is_compared_and_no_node_is_blamed_for_it(
    tmp_path: Path,
) -> None:
    text = "g (float[n,8] x) => (float[n,8] y, float[8] c, float[n,8] {}) {{ y = Mul(x, c) z = {}(x) }}"
    weight = np.arange(1, 9, dtype=np.float32)
    a = file_of(tmp_path / "a.onnx", text.format("x", "Identity"), c=weight)
    for name, op, by, expected in (
        ("same", "Identity", 1, None),
        ("weight", "Identity", 100, "c"),
        ("input", "Neg", 1, "x"),
    ):
        b = file_of(tmp_path / f"{name}.onnx", text.format("z", op), c=weight * np.float32(by))
        facts = compared(a, b, rows_of(6), tmp_path / "node")
        first = facts["first"] or {"tensor": None, "op": "no node"}
        assert (first["tensor"], first["op"]) == (expected, "no node")
        assert facts["astray"] == (2 if expected else 0), facts
        assert facts["not_written"] is None or "an input or a weight" in facts["not_written"]
        assert not (tmp_path / "node").exists()


def test_outputs_correspond_by_name_and_the_others_by_their_order(tmp_path: Path) -> None:
    """``c``, a weight, is an output of each file, and no node makes it."""
    text = "g (float[n,8] x) => ({1}, float[8] c) {{ {0} = Exp(x) z = {2}({0}) }}"

    def file(name: str, inner: str, *outputs: str, op: str = "Neg") -> Path:
        ends = ", ".join(f"float[n,8] {one}" for one in outputs)
        return file_of(tmp_path / f"{name}.onnx", text.format(inner, ends, op), c=WEIGHT[0])

    a, x = file("a", "y", "y", "z"), rows_of(6)
    assert compared(a, file("other", "w", "z", "w"), x)["equal"]
    assert compared(a, file("wrong", "w", "z", "w", op="Sin"), x)["first"]["tensor"] == "z"
    fewer = compared(a, file("fewer", "w", "z"), x)
    assert (fewer["first"]["tensor"], fewer["astray"]) == ("y", 1)


def test_a_reproduction_of_a_function_runs(tmp_path: Path) -> None:
    text = """g (float[n,8] x) => (float[n,8] y) {{ y = own.Scaled(x) }}
        <domain: "own", opset_import: ["" : 17]> Scaled (r) => (s) {{
            k = Constant<value = float {{{}}}>() s = Mul(r, k)
        }}"""
    for name, by in (("a", 2.0), ("b", 3.0)):
        onnx.save(parsed(text.format(by), more=', "own" : 1'), tmp_path / f"{name}.onnx")
    x = rows_of(4)
    assert compared(tmp_path / "a.onnx", tmp_path / "b.onnx", x, tmp_path / "node")["first"]["tensor"] == "y"
    with np.load(tmp_path / "node" / "inputs.npz") as inputs:
        found = onnxruntime.InferenceSession(tmp_path / "node" / "node.onnx").run(None, dict(inputs))
    np.testing.assert_array_equal(np.asarray(found[0]), 2 * x)
