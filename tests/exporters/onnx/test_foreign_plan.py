"""The nodes that are half, the places of the casts, and the plan's words about the nodes that it keeps."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.onnx.precision.file_rules import matches
from halfeven.exporters.onnx.reading.typing import value_types
from halfeven.models.errors import BadSetting
from halfeven.models.folder.package import Precision
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from tests.exporters.onnx.onnx_files import (
    ConvertedFile,
    convert,
    element_types,
    errors_u,
    nodes_of,
    parsed,
)
from tests.exporters.onnx.traps import FOREIGN

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
WIDE = 1e3  # u: the claim is about the graph, whatever the numbers drawn err by
ENCODER = (
    "g (int64[n,5] ids) => (float[n,5,8] y) { e = Gather(table, ids) l = LayerNormalization(e, s, b) h = MatMul(l, w)"
    " p = Softmax<axis=-1>(h) z = MatMul(p, w) r = Relu(z) y = Add(r, h) }"
)


def encoder() -> ModelProto:
    random = np.random.default_rng(3)
    return parsed(
        ENCODER,
        {
            "table": random.standard_normal((100, 8)).astype(np.float32),
            "s": np.ones(8, np.float32),
            "b": np.zeros(8, np.float32),
            "w": (random.standard_normal((8, 8)) * 0.3).astype(np.float32),
        },
    )


def ids(rows: int = 16) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng().integers(0, 100, (rows, 5))}


def computed(foreign: ConvertedFile) -> dict[str, int]:
    """Node name of the original → element type of its first output in the half, bodies included."""
    assert foreign.written.half_graph is not None
    types = value_types(foreign.written.half_graph.model, foreign.written.half_graph.weights)
    return {node.name: types[node.output[0]] for node in foreign.written.half_graph.model.graph.node}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "half"),
    [
        ("O1", {"matmul", "matmul_2", "relu", "add"}),
        ("O2", {"gather", "layernormalization", "matmul", "softmax", "matmul_2", "relu", "add"}),
        ("O3", {"gather", "layernormalization", "matmul", "softmax", "matmul_2", "relu", "add"}),
    ],
)
def test_each_level_halves_what_it_says(level: str, half: set[str], tmp_path: Path) -> None:
    foreign = convert(tmp_path, encoder(), ids(), level)
    types = computed(foreign)
    nodes = {node.name for node in foreign.program.nodes}
    # O2's norm computes in FP32: its own output is, and the cast behind it gives half
    inside = half - ({"layernormalization"} if level == "O2" else set())
    assert {name for name in nodes if types[name] == FLOAT16} == inside
    assert max(errors_u(foreign, ids(9)).values()) <= 4.0


@pytest.mark.slow
def test_a_lookup_is_half_where_embeddings_are(tmp_path: Path) -> None:
    kept = convert(tmp_path / "a", encoder(), ids())
    half = convert(tmp_path / "b", encoder(), ids(), embeddings="half")
    assert computed(kept)["gather"] == FLOAT and computed(half)["gather"] == FLOAT16
    assert half.half is not None and element_types(half.half)["table__half"] == FLOAT16
    assert half.written.bytes < kept.written.bytes < kept.written.bytes_fp32


def test_o0_is_the_original(tmp_path: Path) -> None:
    foreign = convert(tmp_path, encoder(), ids(), "O0")
    assert foreign.half is None and foreign.written.half_graph is None
    assert (foreign.half_nodes, foreign.written.casts, foreign.written.bytes) == (
        0,
        0,
        foreign.written.bytes_fp32,
    )


def test_the_counts_add_up(tmp_path: Path) -> None:
    foreign = convert(tmp_path, encoder(), ids(), keep=["relu"])
    assert foreign.half is not None
    assert foreign.written.nodes == 7
    assert foreign.written.nodes == foreign.half_nodes + foreign.written.fp32_by_policy + len(foreign.kept)
    added = len(foreign.half.graph.node) - len(foreign.original.graph.node)
    assert foreign.written.casts == added == len(nodes_of(foreign.half, "Cast"))
    stored = sum(numpy_helper.to_array(t).nbytes for t in foreign.half.graph.initializer)
    assert foreign.written.bytes == stored


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["relu", "op:Relu", "op:relu", "rel*", "op:R?lu"])
def test_keep_patterns_name_nodes_and_ops(pattern: str, tmp_path: Path) -> None:
    foreign = convert(tmp_path, encoder(), ids(), keep=[pattern])
    (kept,) = foreign.kept
    assert (kept.node, kept.op, kept.reason) == ("relu", "Relu", f"asked for by keep = {pattern!r}")
    assert computed(foreign)["relu"] == FLOAT


@pytest.mark.slow
def test_a_keep_pattern_reaches_into_the_body_of_the_node_it_names(tmp_path: Path) -> None:
    trap = FOREIGN["an If that captures"]
    foreign = convert(
        tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), keep=["if"], max_batch_size=1
    )
    assert {kept.node for kept in foreign.kept} == {
        node.name for node in foreign.program.nodes if node.name.startswith("if.")
    }
    with pytest.raises(BadSetting, match="matches no node"):
        convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), keep=["i"])
    assert not matches(NodeProto(name="iffy", op_type="Relu"), "if")


REWRITTEN = {
    "op:Upsample": (9, "g (float[n,1,8,8] x) => (float[n,1,16,16] y) { h = Conv(x, k) u = Upsample(h, twice) y = Relu(u) }", {"resize"}),
    "make.c": (17, "g (float[n,1,8,8] x) => (float[n,1,8,8] y) { c = Constant<value_float = 2.0>() h = Conv(x, k) y = Mul(h, c) }", set()),
    "op:Neg": (17, "g (float[n,1,8,8] x) => (float[n,1,8,8] y) { unread = Neg(x) y = Conv(x, k) }", set()),
    "make.t": (17, 'g (float[n,1,8,8] x) => (float[n,1,8,8] y) { h = loc.f(x) y = Conv(h, k) } <domain: "loc", opset_import: ["" : 17]> f (a) => (b) { t = Neg(a) b = Tanh(t) }', {"make.t__1"}),
}  # fmt: skip


@pytest.mark.parametrize("pattern", REWRITTEN)
def test_a_keep_pattern_means_also_a_node_of_the_file_that_is_folded_or_another_node(
    pattern: str, tmp_path: Path
) -> None:
    opset, text, expected = REWRITTEN[pattern]
    weights = {"k": np.ones((1, 1, 1, 1), np.float32), "twice": np.array([1, 1, 2, 2], np.float32)}
    model = parsed(text, weights, opset, ', "loc" : 1')
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        node.name = f"make.{node.output[0]}"
    rows = {"x": np.random.normal(size=(16, 1, 8, 8)).astype(np.float32)}
    foreign = convert(tmp_path, model, rows, "O3", keep=[pattern], max_error_u=WIDE)
    assert {kept.node for kept in foreign.kept} == expected


def test_an_initialiser_is_stored_in_both_only_where_both_are_read(tmp_path: Path) -> None:
    trap = FOREIGN["an initialiser with readers of both kinds"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), max_error_u=WIDE)
    assert foreign.half is not None
    assert element_types(foreign.half) == {
        "w": FLOAT, "w__half": FLOAT16, "b": FLOAT, "b__half": FLOAT16, "ax": TensorProto.INT64,
    }  # fmt: skip
    rows = FOREIGN["mlp"].inputs(np.random.default_rng(), 16)
    simple = convert(tmp_path, FOREIGN["mlp"].model(), rows, max_error_u=WIDE)
    assert simple.half is not None
    assert set(element_types(simple.half).values()) == {FLOAT16}
    assert simple.written.bytes * 2 == simple.written.bytes_fp32


def test_what_a_body_captures_is_cast_once_outside(tmp_path: Path) -> None:
    text = (
        "g (float[n,8] x) => (float[n,8] y) { n3 = Constant<value_int=3>() go = Constant<value = bool {1}>() h = MatMul(x, w)"
        " last = Loop(n3, go, h) < body = b (int64 i, bool c, float[n,8] s) => (bool c2, float[n,8] s2)"
        " { c2 = Identity(c) m = MatMul(x, w) a = Add(m, s) s2 = MatMul(a, w) } > y = Relu(last) }"
    )
    model = parsed(text, {"w": (np.random.default_rng().standard_normal((8, 8)) * 0.2).astype(np.float32)})
    x = np.random.default_rng().standard_normal((16, 8)).astype(np.float32)
    foreign = convert(tmp_path, model, {"x": x}, max_error_u=WIDE)
    assert foreign.half is not None
    (loop,) = nodes_of(foreign.half, "Loop")
    body = loop.attribute[0].g
    assert [node.op_type for node in body.node] == ["Identity", "MatMul", "Add", "MatMul"]
    types = [value.type.tensor_type.elem_type for value in (*body.input[2:], *body.output[1:])]
    assert types == [FLOAT16, FLOAT16]


def test_a_state_that_is_fp32_anywhere_is_fp32_throughout(tmp_path: Path) -> None:
    trap = FOREIGN["a Loop that makes its state FP32"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16))
    assert foreign.half is not None
    (loop,) = nodes_of(foreign.half, "Loop")
    body = loop.attribute[0].g
    assert [v.type.tensor_type.elem_type for v in (*body.input[2:], *body.output[1:])] == [FLOAT, FLOAT]


@pytest.mark.slow
def test_the_scales_of_a_resize_stay_fp32_and_its_data_may_be_half(tmp_path: Path) -> None:
    trap = FOREIGN["a Resize with scales"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), "O3")
    assert foreign.half is not None
    (resize,) = nodes_of(foreign.half, "Resize")
    assert computed(foreign)["resize"] == FLOAT16
    assert resize.input[1] == "" and element_types(foreign.half)[resize.input[2]] == FLOAT


@pytest.mark.slow
def test_what_is_computed_from_constants_stays_exact_and_makes_nobody_fp32(tmp_path: Path) -> None:
    trap = FOREIGN["sines of positions to 4095"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), "O3")
    types = computed(foreign)
    assert types["mul"] == types["sin"] == types["cos"] == FLOAT
    assert types["matmul"] == types["add"] == types["matmul_2"] == FLOAT16
    assert foreign.kept == ()


@pytest.mark.slow
def test_a_masks_sentinel_is_rewritten_and_the_row_masked_whole_stays_even(tmp_path: Path) -> None:
    trap = FOREIGN["masks with fully masked rows"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), "O3")
    assert any("mask value" in note for note in foreign.notes)
    assert not any("sentinel" in kept.reason for kept in foreign.kept)
    inputs = trap.inputs(np.random.default_rng(), 4)
    inputs["mask"][:] = 0
    expected = inputs["x"].mean(1, keepdims=True)
    assert np.allclose(
        foreign.oracle_answers()(inputs)["y"], np.broadcast_to(expected, inputs["x"].shape), atol=2e-3
    )


@pytest.mark.slow
def test_every_node_that_the_search_keeps_has_its_certificate(tmp_path: Path) -> None:
    trap = FOREIGN["a norm whose squares overflow"]
    # Fixed: of other samples the search keeps another node, whose profile names no overflow.
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(11), 16))
    searched = foreign.planner.plan.searched
    assert searched and all(kept.evidence.startswith("without it: ") for kept in searched)
    assert any(kept.reason.startswith("overflow: ") for kept in searched), "as a module's nodes are"
    assert foreign.found is not None and foreign.found.minimal and not foreign.found.before.passed


def test_a_files_own_islands_and_halves_survive(tmp_path: Path) -> None:
    trap = FOREIGN["a file that is mixed already"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(11), 16))
    types = computed(foreign)
    assert types["matmul"] == types["matmul_2"] == FLOAT16
    assert types["mul"] == types["sqrt"] == types["add"] == FLOAT
    assert {t.data_type for t in foreign.original.graph.initializer} == {FLOAT}
    assert any("widened" in note for note in foreign.notes) and any(
        "stay so" in note for note in foreign.notes
    )


@pytest.mark.slow
def test_a_half_file_keeps_half_on_the_wire_and_has_an_fp32_original(tmp_path: Path) -> None:
    trap = FOREIGN["a file that is half throughout"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16))
    assert [tensor.datatype for tensor in (*foreign.spec.inputs, *foreign.spec.outputs)] == ["FP16", "FP16"]
    types = value_types(foreign.program.model, foreign.program.weights)
    assert {types[node.output[0]] for node in foreign.original.graph.node if node.op_type != "Cast"} == {
        FLOAT
    }
    assert set(computed(foreign).values()) == {FLOAT16}
    assert foreign.half is not None and "Cast" not in {node.op_type for node in foreign.half.graph.node}


def test_bf16_is_fp32_where_this_runtime_has_no_kernels_and_says_so(tmp_path: Path) -> None:
    trap = FOREIGN["mlp"]
    foreign = convert(tmp_path, trap.model(), trap.inputs(np.random.default_rng(), 16), dtype="bf16")
    if foreign.half is None:
        assert {kept.op for kept in foreign.kept} >= {"Gemm", "MatMul"}
        assert all("no bf16 kernel" in kept.reason for kept in foreign.kept)
    else:
        assert max(errors_u(foreign, trap.inputs(np.random.default_rng(), 5)).values()) <= 4.0


@pytest.mark.slow
def test_a_conversion_is_the_same_every_time(tmp_path: Path) -> None:
    trap = FOREIGN["a norm whose squares overflow"]
    samples = trap.inputs(np.random.default_rng(), 16)
    one, two = (convert(tmp_path / part, trap.model(), samples) for part in "ab")
    assert one.half is not None and two.half is not None
    assert one.half.SerializeToString(deterministic=True) == two.half.SerializeToString(deterministic=True)
    assert one.kept == two.kept


@pytest.mark.slow
def test_the_planning_of_a_half_leaves_the_original_as_it_was(tmp_path: Path) -> None:
    trap = FOREIGN["an output that is read inside"]
    model = trap.model()
    samples = trap.inputs(np.random.default_rng(), 16)
    foreign = convert(tmp_path, model, samples)
    again = convert(tmp_path, onnx.load(tmp_path / "model.onnx"), samples, "O0")
    assert foreign.original.SerializeToString(deterministic=True) == again.original.SerializeToString(
        deterministic=True
    )
    assert Precision() == foreign.maker.settled.precision
