"""Indices of a foreign graph that may differ because their scores tie, and those that may not."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF
from halfeven.exporters.gate.ties import Ties
from halfeven.exporters.onnx.precision.ties import FileChoices, find_tied
from halfeven.exporters.onnx.runtime import runtime_answers
from onnx import ModelProto

from tests.exporters.onnx.onnx_files import convert, parsed
from tests.exporters.onnx.traps import f32

U, ROWS, WIDTH = UNIT_ROUNDOFF["fp16"], 6, 7
K2 = " k = Constant<value_ints=[2]>() v, i = TopK<axis=1>(a, k)"
CHOICES = {
    "argmax": "y = ArgMax<axis=1, keepdims=0>(a)",
    "argmax kept": "y = ArgMax<axis=-1>(a)",
    "argmin": "b = Neg(a) y = ArgMin<axis=1, keepdims=0>(b)",
    "argmax of scores that stand in the first axis": "b = Transpose<perm=[1,0]>(a) y = ArgMax(b)",
    "topk": "k = Constant<value_ints=[3]>() v, y = TopK(a, k)",
    "reshaped": K2
    + " one = Constant<value_ints=[1]>() u = Unsqueeze(i, one) t = Transpose<perm=[0,2,1]>(u) to = Constant<value_ints=[-1,2]>()"
    " r = Reshape(t, to) y = Cast<to=6>(r)",
    "shaped as the input is": K2
    + " s = Shape(x) rows = Gather(s, zero) two = Constant<value_ints=[2]>() to = Concat<axis=0>(rows, two) y = Reshape(i, to)",
    "selected": K2 + " y = Gather<axis=1>(i, zero)",
    "split": K2 + " p, y = Split<axis=1>(i, halves)",
}


def graph(kind: str) -> ModelProto:
    type_ = "int32" if "Cast" in CHOICES[kind] else "int64"
    text = f"g (float[n,{WIDTH}] x) => ({type_}[p,q] y) {{ a = Mul(x, one32) {CHOICES[kind]} }}"
    weights = {"one32": f32(1.0), "zero": np.asarray([0]), "halves": np.asarray([1, 1])}
    model = parsed(text, weights, 13)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def scores(gap_u: float) -> np.ndarray:
    """A permutation of 1, 2, … in every line, the second so near to the first; S is the width."""
    x = f32(np.random.default_rng().random((ROWS, WIDTH)).argsort(1) + 1)
    for row in x:
        first, second = row.argsort()[::-1][:2]
        row[second] = row[first] - gap_u * U * WIDTH
    return x


def described(kind: str, x: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two masks: the places where the answer to ``other`` may stand for the answer to ``x``, and those where it is
    another."""
    model = graph(kind)
    answers = runtime_answers(model)
    reference, candidate = answers({"x": x}), answers({"x": other})
    tied = find_tied(model)
    outputs = [one.output for one in tied]
    ties = Ties(outputs, FileChoices(model, tied), U, lambda: [{"x": x}])
    different = np.not_equal(reference["y"], candidate["y"])
    tolerated = ties.tolerated({"x": x}, reference, candidate)
    return tolerated["y"] if tolerated else np.zeros_like(different), different


def lowered(x: np.ndarray, by: float) -> np.ndarray:
    """The rows with the largest number of each lowered, so that another number may be the largest."""
    return np.where(x == x.max(1, keepdims=True), x - f32(by), x)


@pytest.mark.parametrize("kind", CHOICES)
def test_first_places_that_nearly_tie_may_swap(kind: str) -> None:
    x = scores(3.9)
    tolerated, different = described(kind, x, lowered(x, 8 * U * WIDTH))
    assert different.any() and tolerated[different].all()


@pytest.mark.parametrize("kind", CHOICES)
def test_first_places_just_too_far_apart_may_not_swap(kind: str) -> None:
    x = scores(4.1)
    tolerated, different = described(kind, x, lowered(x, 9 * U * WIDTH))
    assert different.any() and not tolerated[different].any()


@pytest.mark.parametrize("kind", ["argmax", "argmax of scores that stand in the first axis"])
def test_a_tie_elsewhere_in_the_line_excuses_nobody(kind: str) -> None:
    x = scores(0.0)
    third = np.where(x >= np.sort(x, 1)[:, -2:-1], f32(0), x)
    tolerated, different = described(kind, x, third)
    assert different.all() and not tolerated.any()


def test_indices_that_are_computed_with_are_not_looked_for() -> None:
    assert [tied.output for tied in find_tied(graph("topk"))] == ["y"]
    assert (
        find_tied(
            parsed("g (float[n,7] x) => (int64[n] y) { i = ArgMax<axis=1,keepdims=0>(x) y = Add(i, i) }")
        )
        == []
    )
    assert (
        find_tied(parsed("g (float[n,7] x) => (float[n,1] y) { i = ArgMax<axis=1>(x) y = Cast<to=1>(i) }"))
        == []
    )


def test_scores_that_tie_in_half_keep_no_node_in_fp32(tmp_path: Path) -> None:
    """Two classes with the same weights but for a millionth: half cannot tell them apart, and need not."""
    random = np.random.default_rng()
    w = f32(random.standard_normal((8, 6)))
    w = np.concatenate([w, w * f32(1 + 1e-6)], 1)
    model = parsed(
        "g (float[n,8] x) => (int64[n] y) { s = MatMul(x, w) y = ArgMax<axis=1, keepdims=0>(s) }", {"w": w}
    )
    foreign = convert(tmp_path, model, {"x": f32(random.standard_normal((16, 8)))})
    assert foreign.half is not None and foreign.kept == ()
