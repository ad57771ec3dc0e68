"""Sizes that the declared shapes settle become constants, free ones stay, and what does nothing goes."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.onnx.precision.rewrite import drop_casts
from halfeven.exporters.onnx.reading.graph import HALVES, ForeignProgram, assembled
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.onnx.reading.typing import value_types
from halfeven.exporters.onnx.runtime import runtime_answers
from onnx import NodeProto

from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import f32, normal

SCALED = "g (float[n,4,8] x) => (float[n,4,4] y) { s = Shape(x) d = Gather(s, last) f = CastLike(d, x) r = Sqrt(f) q = Div(x, r) t = Transpose<perm=[0,2,1]>(x) y = MatMul(q, t) }"
SLICED = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) z = Shape<start=1>(h) a = Slice(w, zero, z) b = Slice(h, zero, z, one) y = MatMul(b, a) }"
NAMED = {"last": np.asarray([-1]), "zero": np.asarray([0]), "one": np.asarray([1])}


def program_of(text: str, **more: object) -> ForeignProgram:
    weights = {"w": normal(np.random.default_rng(3), 8, 8), **NAMED}
    return normalise(
        parsed(text, {**weights, **{k: np.asarray(v) for k, v in more.items()}}), Path("model.onnx")
    )


def ops(program: ForeignProgram) -> list[str]:
    return [node.op_type for node in program.nodes]


def test_the_width_of_a_head_is_a_constant_and_so_is_its_scale() -> None:
    program = program_of(SCALED)
    assert ops(program) == ["Div", "Transpose", "MatMul"]
    assert any(np.array_equal(array, f32([np.sqrt(np.float32(8))])) for array in program.weights.values())


@pytest.mark.parametrize("place", [0, -3])
def test_a_free_size_is_looked_up_at_every_call(place: int) -> None:
    program = program_of(SCALED, last=[place])
    assert "Shape" in ops(program)
    answer = runtime_answers(assembled(program.model, program.weights))
    for rows in (1, 4):
        x = normal(np.random.default_rng(), rows, 4, 8)
        expected = (x / np.sqrt(np.float32(rows))) @ x.transpose(0, 2, 1)
        assert np.allclose(answer({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


def test_weights_are_cut_once_by_a_size_that_is_known() -> None:
    assert ops(program_of(SLICED)) == ["MatMul", "Slice", "MatMul"]


@pytest.mark.parametrize(
    ("end", "steps", "stays"), [(2**63 - 1, 1, 0), (2**31 - 1, 1, 0), (7, 1, 1), (2**63 - 1, 2, 1)]
)
def test_a_slice_of_the_original_goes(end: int, steps: int, stays: int) -> None:
    text = "g (float[n,8] x) => (float[n,k] y) { a = Slice(x, zero, end, one, steps) y = Abs(a) }"
    assert ops(program_of(text, end=[end], steps=[steps])).count("Slice") == stays


@pytest.mark.parametrize(
    ("reader", "stays"), [("IsNaN(f)", 0), ("Less(f, naught)", 0), ("Less(f, some)", 1), ("Not(b)", 1)]
)
def test_a_files_own_float_stays_but_for_readers_that_do_not_look_at_the_precision(
    reader: str, stays: int
) -> None:
    text = f"g (float[n,8] x) => (bool[n,8] y, float[n,8] z) {{ f = Cast<to=1>(x) e = Exp(f) b = IsNaN(e) y = {reader} z = Abs(x) }}"
    if reader != "Not(b)":
        text = text.replace("e = Exp(f) b = IsNaN(e) ", "")
    assert ops(program_of(text, naught=f32(0.0), some=f32(0.1))).count("Cast") == stays


def test_a_cast_to_the_integers_that_it_has_goes() -> None:
    text = "g (float[n,8] x, int64[n,1] at) => (float[n,1] y) { i = Cast<to=7>(at) y = GatherElements<axis=1>(x, i) }"
    assert ops(program_of(text)) == ["GatherElements"]


@pytest.mark.parametrize(("dtype", "casts"), [("fp16", ["h"]), ("bf16", ["f", "h"])])
def test_an_integer_goes_to_fp16_in_one_cast_and_to_bf16_in_two(dtype: str, casts: list[str]) -> None:
    """FP32 holds exactly whatever integer FP16 does, but rounds once more on the way to bf16."""
    half = HALVES[dtype]
    text = (
        f"g (int64[n,8] x) => (float[n,8] y) {{ f = Cast<to=1>(x) h = Cast<to={half}>(f) y = Cast<to=1>(h) }}"
    )
    inner = [node for node in without_casts(text, half) if node.output[0] != "y"]
    assert [node.output[0] for node in inner] == casts and inner[0].input[0] == "x"


@pytest.mark.parametrize(
    ("inside", "left"),
    [
        ("h = Cast<to=10>(x) r = Relu(h) y = Cast<to=10>(r)", "y = Relu(x)"),
        ("r = Relu(x) f = Cast<to=1>(r) y = Cast<to=10>(f)", "y = Relu(x)"),
        ("r = Relu(x) y = Cast<to=10>(r) f = Exp(r)", "y = Relu(x) f = Exp(y)"),
        (
            "f = Cast<to=1>(x) h = Cast<to=10>(f) g = Cast<to=1>(h) i = Cast<to=10>(g) y = Relu(i)",
            "y = Relu(x)",
        ),
        ("y = Cast<to=10>(x)", "y = Cast(x)"),  # an input and an output are two values
        ("w = Cast<to=1>(x) y = Cast<to=10>(w)", "y = Cast(x)"),
    ],
)
def test_between_a_half_input_and_a_half_output_no_cast_is_left_that_does_nothing(
    inside: str, left: str
) -> None:
    nodes = without_casts(f"g (float16[n,8] x) => (float16[n,8] y) {{ {inside} }}", HALVES["fp16"])
    assert " ".join(f"{node.output[0]} = {node.op_type}({node.input[0]})" for node in nodes) == left


def without_casts(text: str, half: int) -> list[NodeProto]:
    """The nodes of a graph after `drop_casts`."""
    model = parsed(text)
    for node in model.graph.node:
        node.name = f"{node.output[0]}.{node.op_type}"
    drop_casts(model.graph, half, lambda: value_types(model, {}))
    return list(model.graph.node)
