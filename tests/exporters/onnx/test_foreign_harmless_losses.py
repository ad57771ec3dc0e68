"""The search at O3 decides on constants that half loses; guards of divisions never vanish, small counts are half."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.onnx.precision.file_rules import narrow_casts
from halfeven.exporters.onnx.precision.op_lists import rules
from halfeven.exporters.onnx.precision.profile import profile
from halfeven.exporters.onnx.reading.graph import ForeignProgram
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.models.folder.package import Precision
from onnx import TensorProto

from tests.exporters.onnx.onnx_files import (
    ConvertedFile,
    convert,
    element_types,
    errors_u,
    nodes_of,
    parsed,
)
from tests.exporters.onnx.traps import f32, normal

GAIN = (
    "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) b = Mul(h, tiny) r = Add(h, b) y = MatMul(r, w) }"
)
RATIO = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Abs(h) s = ReduceMax<axes=[1], keepdims=1>(a) d = Add(s, tiny) y = Div(h, d) }"
LOGARITHM = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) a = Abs(h) r = Add(a, one) s = Sub(r, one) t = Relu(s) d = Add(t, tiny) y = Log(d) }"
NAN_TO_NUM = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) i = IsInf(h) z = Where(i, largest, h) y = MatMul(z, w) }"
COUNTED = "g (float[n,5,8] x, int64[n,5] mask) => (float[n,8] y) { f = Cast<to=1>(mask) u = Unsqueeze(f, last) p = Mul(x, u) s = ReduceSum<keepdims=0>(p, axis) c = ReduceSum<keepdims=1>(f, axis) y = Div(s, c) }"
NUMBERED = "g (int64[n] id) => (float[n,1] y) { f = Cast<to=1>(id) u = Unsqueeze(f, axis) a = Mul(u, rate) y = Sin(a) }"


def made(
    path: Path, text: str, samples: dict[str, np.ndarray], level: str = "O3", **more: object
) -> ConvertedFile:
    weights = {
        "w": 0.3 * normal(np.random.default_rng(3), 8, 8),
        **{k: np.asarray(v) for k, v in more.items()},
    }
    return convert(path, parsed(text, weights), samples, level)


def x(rows: int = 16) -> dict[str, np.ndarray]:
    return {"x": normal(np.random.default_rng(), rows, 8)}


@pytest.mark.slow
def test_a_gain_that_nobody_misses_is_in_fp32_by_rule_at_o1_and_in_half_at_o3(tmp_path: Path) -> None:
    ruled, searched = (made(tmp_path / level, GAIN, x(256), level, tiny=f32(1e-9)) for level in ("O1", "O3"))
    assert ruled.half is not None and searched.half is not None and ruled.kept == searched.kept == ()
    types = [set(element_types(half).values()) for half in (ruled.half, searched.half)]
    assert TensorProto.FLOAT in types[0] and types[1] == {TensorProto.FLOAT16}
    assert errors_u(searched, x())["y"] <= 4.0


@pytest.mark.slow
def test_what_guards_a_division_becomes_halfs_least_number_and_guards(tmp_path: Path) -> None:
    foreign = made(tmp_path, RATIO, x(), tiny=f32(1e-8))
    assert "Add" not in {kept.op for kept in foreign.kept} and foreign.written.half_graph is not None
    (guard,) = (a for name, a in foreign.written.half_graph.weights.items() if name.startswith("tiny"))
    assert guard.dtype == np.float16 and float(guard) == 2.0**-24
    zeros = {"x": np.zeros((3, 8), np.float32)}
    assert (foreign.oracle_answers()(zeros)["y"] == 0).all()


def test_what_guards_a_logarithm_stays(tmp_path: Path) -> None:
    samples = {"x": 1.0 + np.abs(normal(np.random.default_rng(), 16, 8))}
    foreign = made(tmp_path, LOGARITHM, samples, tiny=f32(1e-8), one=f32(1.0))
    assert any("tiny" in kept.reason for kept in foreign.kept)
    assert np.isfinite(foreign.oracle_answers()({"x": np.zeros((3, 8), np.float32)})["y"]).all()


@pytest.mark.slow
def test_what_stands_for_infinity_is_halfs_largest_number(tmp_path: Path) -> None:
    foreign = made(tmp_path, NAN_TO_NUM, x(), largest=f32(np.finfo(np.float32).max))
    assert foreign.kept == () and foreign.written.half_graph is not None
    assert 65504.0 in {float(a) for a in foreign.written.half_graph.weights.values() if a.ndim == 0}


def masked(rows: int = 16) -> dict[str, np.ndarray]:
    random = np.random.default_rng()
    mask = (random.random((rows, 5)) < 0.6).astype(np.int64)
    mask[:, 0] = 1
    return {"x": normal(random, rows, 5, 8), "mask": mask}


def test_a_mask_goes_to_half_in_one_cast(tmp_path: Path) -> None:
    foreign = made(tmp_path, COUNTED, masked(), axis=[1], last=[2])
    assert foreign.half is not None and foreign.kept == ()
    types = element_types(foreign.half)
    assert types.get("f", TensorProto.FLOAT16) == TensorProto.FLOAT16
    assert len(nodes_of(foreign.half, "Cast")) == 3  # x, the mask, y
    assert errors_u(foreign, masked())["y"] <= 4.0


@pytest.mark.parametrize(("most", "casts"), [(100, ["Cast"]), (512, ["Cast"]), (4000, [])])
def test_only_small_integers_go_to_half_at_once(most: int, casts: list[str]) -> None:
    program = normalise(parsed(NUMBERED, {"axis": np.asarray([1]), "rate": f32([0.5])}), Path("model.onnx"))
    ids = {"id": np.array([0, 3, most - 1])}
    assert narrow(program, ids) == casts


def narrow(program: ForeignProgram, inputs: dict[str, np.ndarray]) -> list[str]:
    ranges = profile(program, [inputs], "fp16")
    found = narrow_casts(program, rules(program, Precision("O3")), ranges, "fp16")
    return [node.op_type for node in found]


CLIPPED = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) l = Mul(h, large) s = Mul(l, l) c = Clip(s, zero, most) y = Mul(h, c) }"


def test_an_overflow_that_is_clipped_away_keeps_nothing_in_fp32(tmp_path: Path) -> None:
    foreign = made(tmp_path, CLIPPED, x(), large=f32(300.0), zero=f32(0.0), most=f32(1000.0), tiny=f32(1e-3))
    assert foreign.kept == ()
    assert errors_u(foreign, x())["y"] <= 4.0
