"""A value that is computed of constants alone is a constant, stored once, and the FP32 original answers as before, bit
for bit."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.onnx.precision.oracle import Oracle
from halfeven.exporters.onnx.reading import normalise as normalising
from halfeven.exporters.onnx.reading.graph import ForeignProgram, assembled
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.onnx.runtime import runtime_answers
from onnx import ModelProto, TensorProto

from tests.exporters.onnx.foldable import MODELS, inputs_of
from tests.exporters.onnx.onnx_files import convert, element_types, errors_u, parsed
from tests.exporters.onnx.traps import EVERY_RUN, f32, normal
from tests.slow import slow_part_but

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
CHAINS = parsed(
    "g (float[n,8] x) => (float[n,16] y) { t = Transpose<perm=[1,0]>(w) s = Shape(w) two = Gather(s, last) m = Mul(t, c)"
    " like = CastLike(c, x) z = Expand(like, two) b = Concat<axis=0>(z, z) u = Identity(b) h = MatMul(x, m) y = Add(h, u) }",
    {
        "w": normal(np.random.default_rng(5), 16, 8),
        "c": f32(0.5),
        "last": np.asarray([1]),
    },
)


def read(model: ModelProto) -> ForeignProgram:
    return normalise(ModelProto.FromString(model.SerializeToString()), Path("model.onnx"))


def unfolded(model: ModelProto, monkeypatch: pytest.MonkeyPatch) -> ForeignProgram:
    with monkeypatch.context() as patch:
        patch.setattr(normalising, "fold", lambda *_: None)
        return read(model)


@pytest.mark.parametrize("name", slow_part_but(2, EVERY_RUN, MODELS))
def test_the_original_answers_as_before_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    before = unfolded(model, monkeypatch)
    after = read(model)
    assert len(after.nodes) <= len(before.nodes)
    inputs = inputs_of(name)
    one, other = (Oracle(program.model, program.weights).run(inputs) for program in (before, after))
    served, again = (runtime_answers(assembled(p.model, p.weights))(inputs) for p in (before, after))
    for pair in ((one, other), (served, again)):
        for output, expected in pair[0].items():
            assert expected.tobytes() == pair[1][output].tobytes(), output


def test_chains_of_constants_are_constants_and_the_half_stores_them_once(tmp_path: Path) -> None:
    x = {"x": normal(np.random.default_rng(), 16, 8)}
    foreign = convert(tmp_path, CHAINS, x)
    assert [node.op_type for node in foreign.program.nodes] == ["MatMul", "Add"]
    assert foreign.half is not None
    assert sorted(element_types(foreign.half).values()) == [FLOAT16, FLOAT16]
    assert foreign.written.bytes * 2 == foreign.written.bytes_fp32 == 4 * (16 * 8 + 16)
    assert (
        foreign.written.nodes,
        foreign.half_nodes,
        foreign.written.fp32_by_policy,
        foreign.written.casts,
    ) == (
        2,
        2,
        0,
        2,
    )
    assert max(errors_u(foreign, {"x": normal(np.random.default_rng(), 5, 8)}).values()) <= 4.0


@pytest.mark.slow
def test_a_tied_table_is_turned_in_half_and_stored_once(tmp_path: Path) -> None:
    text = "g (int64[n,5] ids) => (float[n,5,4000] y) { e = Gather(table, ids) t = Transpose<perm=[1,0]>(table) y = MatMul(e, t) }"
    model = parsed(text, {"table": normal(np.random.default_rng(), 4000, 16, scale=0.2)})
    foreign = convert(
        tmp_path, model, {"ids": np.random.default_rng().integers(0, 4000, (16, 5))}, embeddings="half"
    )
    assert foreign.half is not None and element_types(foreign.half) == {"table__half": FLOAT16}
    assert [node.op_type for node in foreign.half.graph.node] == ["Gather", "Transpose", "MatMul", "Cast"]
    assert foreign.written.bytes * 2 == foreign.written.bytes_fp32


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("r = RandomNormalLike(w) s = Mul(r, zero) h = MatMul(x, w) y = Add(h, s)", "RandomNormalLike"),
        (
            "e = Expand(w, far) m = ReduceMean<axes=[0], keepdims=0>(e) h = MatMul(x, w) y = Add(h, m)",
            "Expand",
        ),
        ("q = DequantizeLinear(i, scale) y = MatMul(x, q)", "DequantizeLinear"),
    ],
)
def test_what_is_drawn_quantised_or_much_larger_stays_in_the_graph(text: str, stays: str) -> None:
    weights = {
        "w": normal(np.random.default_rng(), 8, 8),
        "zero": f32(0),
        "far": np.asarray([2000, 8, 8]),
        "i": np.ones((8, 8), np.int8),
        "scale": f32(0.5),
    }
    program = read(parsed(f"g (float[n,8] x) => (float[n,8] y) {{ {text} }}", weights))
    assert stays in [node.op_type for node in program.nodes]


def test_a_constant_of_a_body_is_folded_in_it(tmp_path: Path) -> None:
    text = (
        "g (float[n,8] x, bool c) => (float[n,8] y) { h = MatMul(x, w) y = If(c) <"
        " then_branch = a () => (float[n,8] p) { t = Transpose<perm=[1,0]>(w) p = MatMul(h, t) },"
        " else_branch = b () => (float[n,8] q) { s = Mul(w, w) q = MatMul(h, s) } > }"
    )
    model = parsed(text, {"w": normal(np.random.default_rng(), 8, 8, scale=0.3)})
    program = read(model)
    assert sorted(node.op_type for node in program.nodes) == ["If", "MatMul", "MatMul", "MatMul"]
