"""A healthy file in which nothing can be half is served in FP32, with the reason in a plain sentence."""

# ruff: noqa: E501  (graphs in their own lines)

from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.onnx.reading.bounded_file import read_graph
from halfeven.models.errors import OutOfMemory
from halfeven.models.order.one_order import OrderBounds, one_order, private_bytes
from halfeven.models.store.store import Store
from onnx import ModelProto, TensorProto, helper

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.small_files import classifier, mlp
from tests.exporters.onnx.traps import normal
from tests.slow import drawn


def original(tmp_path: Path, model: ModelProto) -> tuple[dict[str, Any], str]:
    """The facts of a bare file's conversion, which publishes it in FP32, and why."""
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["status"] == "live" and facts["half"] is None, said
    files = {file.name for file in Store(tmp_path / "store").version("net", 1).folder.iterdir()}
    assert "original.onnx" in files and "half.onnx" not in files
    return facts, facts["reason"]


@pytest.mark.slow
def test_operators_of_ai_onnx_ml_are_served_in_fp32_with_their_probabilities_as_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session of the file is open at a time: that of a large table or of trees takes eight times the file."""
    together, there = list[int](), WeakSet[Any]()

    class Counted(onnxruntime.InferenceSession):
        def __init__(self, *given: Any, **named: Any) -> None:
            there.add(self)
            together.append(len(there))
            super().__init__(*given, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    facts, reason = original(tmp_path, classifier())
    assert len(together) > 1 and max(together) == 1
    assert "ai.onnx.ml (LinearClassifier)" in reason
    assert "guessed: output 'label' is left out: a STRING tensor is not served" in facts["notes"]
    spec = Store(tmp_path / "store").version("net", 1).spec()
    assert [(t.name, t.datatype, t.wire_shape) for t in spec.outputs] == [("probabilities", "FP32", [-1, 3])]


@pytest.mark.slow
@pytest.mark.parametrize("between", ["c = Cast<to=1>(z) h = MatMul(c, w1)", "h = MatMul(z, w1)"])
def test_a_net_beside_an_operator_of_ai_onnx_ml_is_half(between: str, tmp_path: Path) -> None:
    """scikit-learn's converter writes a multilayer perceptron behind a scaler so. Without the Cast no rule of ONNX says
    the type of the product's input."""
    random = np.random.default_rng(3)
    text = f"""g (float[n,16] x) => (float[n,3] y) {{
        z = ai.onnx.ml.Scaler<offset=[0.5],scale=[2.0]>(x) {between} r = Relu(h) y = MatMul(r, w2) }}"""
    weights = {"w1": normal(random, 16, 64, scale=0.2), "w2": normal(random, 64, 3, scale=0.2)}
    onnx.save(parsed(text, weights, more=', "ai.onnx.ml" : 1'), tmp_path / "net.onnx")
    code, facts, _ = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] == 3, facts["reason"]


def test_a_quantised_file_with_a_state_has_its_batch_where_the_state_has_it(tmp_path: Path) -> None:
    """The file was refused once, because of the axis that was guessed for its state."""
    random = np.random.default_rng(4)
    text = """g (float[n,t,4] x, float[1,n,2] h) => (float[1,n,2] next, float[n,2] y) {
        k = DequantizeLinear(w, s) steps = Transpose<perm=[1,0,2]>(x)
        all, next = GRU<hidden_size=2>(steps, k, r, "", "", h) y = Squeeze(next, zero) }"""
    weights = {
        "w": random.integers(-99, 99, (1, 6, 4)).astype(np.int8),
        "s": np.array(0.01, np.float32),
        "r": normal(random, 1, 6, 2),
        "zero": np.array([0]),
    }
    _, reason = original(tmp_path, parsed(text, weights))
    spec = Store(tmp_path / "store").version("net", 1).spec()
    assert "it is quantised" in reason and [tensor.batch_axis for tensor in spec.inputs] == [0, 1]
    assert [tensor.batch_axis for tensor in spec.outputs] == [1, 0]


def test_a_quantised_file_is_served_in_fp32(tmp_path: Path) -> None:
    random = np.random.default_rng()
    text = """g (float[n,64] x) => (float[n,64] y) {
        d = DequantizeLinear(w, s) h = MatMul(x, d) b = Add(h, c) y = Relu(b) }"""
    weights = {
        "w": random.integers(-127, 128, (64, 64)).astype(np.int8),
        "s": np.array(0.01, np.float32),
        "c": normal(random, 64),
    }
    _, reason = original(tmp_path, parsed(text, weights))
    assert "it is quantised: 4096 of its 4161 weights are integers already" in reason


@pytest.mark.slow
def test_a_file_without_a_node_that_may_be_half_is_served_in_fp32(tmp_path: Path) -> None:
    _, reason = original(tmp_path, parsed("g (float[n,8] x) => (float[n,8] y) { y = Sigmoid(x) }"))
    assert "no node of the program is half" in reason
    text = "g (int64[n,8] x) => (int64[n,8] y) { y = Mul(x, x) }"
    (tmp_path / "integers").mkdir()
    original(tmp_path / "integers", parsed(text))


@pytest.mark.slow
def test_a_half_that_saves_next_to_nothing_is_not_a_half(tmp_path: Path) -> None:
    """One small product between casts, in a file whose weights are in an operator that stays in FP32."""
    random = np.random.default_rng()
    text = """g (float[n,256] x) => (float[n,8] y) {
        m = ReduceMean<axes=[1]>(x) s = MatMul(m, a) e = Exp(t) v = ReduceSum<keepdims=0>(e) w = Mul(s, v) y = Exp(w) }"""
    model = parsed(
        text,
        {"a": normal(random, 1, 8, scale=0.01), "t": normal(random, 300, 64, scale=0.1) - 12.0},
        opset=13,
    )
    model.graph.node[2].CopyFrom(helper.make_node("Gather", ["t", "i"], ["e"], axis=0))
    model.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, [None]))
    _, reason = original(tmp_path, model)
    assert "would save 16 of" in reason and "its casts would move more" in reason


def test_what_cannot_be_planned_and_runs_is_served_in_fp32(tmp_path: Path) -> None:
    text = """g (float[n,8] x) => (float[n,8] y) {
        s = SequenceConstruct(x, x) y = SequenceAt(s, one) }"""
    model = parsed(text, {"one": np.array(1)})
    _, reason = original(tmp_path, model)
    assert "it cannot be planned: " in reason and "Sequence" in reason


@pytest.mark.slow
@pytest.mark.parametrize("opset", [7, 9, 11])
def test_an_old_opset_is_converted(opset: int, tmp_path: Path) -> None:
    """ir_version 3, where an initialiser must be an input as well; some exporters leave it out."""
    random = np.random.default_rng()
    model = parsed("g (float[n,8] x) => (float[n,4] y) { h = MatMul(x, w) y = Relu(h) }", {"w": normal(random, 8, 4)}, opset=opset)  # fmt: skip
    model.ir_version = 3
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] == 2, said
    assert any(f"opset {opset} was converted to 17" in note for note in facts["notes"])


def test_an_old_opset_whose_conversion_gives_inputs_other_shapes_is_served_in_fp32(tmp_path: Path) -> None:
    """A Scan of opset 8 has an axis of rows, that of later opsets has none."""
    text = """g (float[1,5,8] x) => (float[1,8] y, float[1,5,8] steps) {
        y, steps = Scan<num_scan_inputs=1, body = b (float[8] s, float[8] xi) => (float[8] so, float[8] yo)
        { c = Add(s, xi) so = Tanh(c) yo = Identity(so) }>(, start, x) }"""
    _, reason = original(tmp_path, parsed(text, {"start": np.zeros((1, 8), np.float32)}, opset=8))
    assert "its conversion to 17 gives input 'x' another shape" in reason


def test_a_file_that_no_runtime_runs_is_refused(tmp_path: Path) -> None:
    model = mlp()
    model.graph.node[-1].op_type = "Unheard"
    onnx.save(model, tmp_path / "net.onnx")
    code, _, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 2 and "Unheard" in said


KINDS = ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "INT4", "UINT4", "INT2", "UINT2"]
READERS = ["DequantizeLinear(q, s)", "Cast<to=1>(q)"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reader"), drawn(3, [*product(KINDS, READERS)]))
def test_constants_of_fp8_and_of_few_bits_stay_and_the_rest_is_half(
    kind: str, reader: str, tmp_path: Path
) -> None:
    random = np.random.default_rng()
    text = "g (float[n,16] x) => (float[n,8] y) { w = READER h = MatMul(x, w) r = Relu(h) k = MatMul(r, u) y = MatMul(k, v) }"
    weights = {"s": np.float32(0.05), "u": normal(random, 16, 64), "v": normal(random, 64, 8)}
    weights = {name: one for name, one in weights.items() if name != "s" or ", s)" in reader}
    two = kind.endswith("INT2")
    model = parsed(text.replace("READER", reader), weights, 25 if two else 21)
    least, end = (-2, 2) if two else (-7, 8)
    steps = random.integers(0 if kind.startswith("U") else least, end, 256).tolist()
    model.graph.initializer.append(helper.make_tensor("q", getattr(TensorProto, kind), [16, 16], steps))
    model.ir_version = 10
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    # All constants of UINT2 are 0 or 1 here: for one draw in 40 the search keeps more nodes in FP32.
    fewest = 1 if kind == "UINT2" else 3
    assert code == 0 and facts["half"] == "fp16" and facts["forms"]["onnx"]["half_nodes"] >= fewest, said
    half = onnx.load(Store(tmp_path / "store").version("net", 1).folder / "half.onnx")
    held = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    assert held["q"] == getattr(TensorProto, kind)


def test_fp64_is_named_where_it_is_why_nothing_is_half(tmp_path: Path) -> None:
    weights = {"w": normal(np.random.default_rng(), 16, 8).astype(np.float64)}
    model = parsed("g (double[n,16] x) => (double[n,8] y) { y = MatMul(x, w) }", weights)
    assert "its numbers are FP64 ('x')" in original(tmp_path, model)[1]


def test_the_memory_that_trees_need_is_counted_before_they_are_loaded(tmp_path: Path) -> None:
    """Protobuf and ONNX Runtime end the process where memory is lacking."""
    stumps = 20_000
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml",
        nodes_nodeids=[0, 1, 2] * stumps, nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * stumps, nodes_featureids=[0] * 3 * stumps,
        nodes_treeids=np.repeat(np.arange(stumps), 3).tolist(),
        nodes_truenodeids=[1, 0, 0] * stumps, nodes_falsenodeids=[2, 0, 0] * stumps, nodes_values=[0.5] * 3 * stumps,
        target_treeids=np.repeat(np.arange(stumps), 2).tolist(), target_nodeids=[1, 2] * stumps,
        target_ids=[0] * 2 * stumps, target_weights=[0.25, -0.25] * stumps,
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 1]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8)
    onnx.save(model, tmp_path / "trees.onnx")
    size = (tmp_path / "trees.onnx").stat().st_size
    with one_order(OrderBounds(memory_bytes=private_bytes() + 64 * size)):
        assert read_graph(tmp_path / "trees.onnx").graph.node
    for share, words in ((5, "reading the trees of trees.onnx"), (11, "loading the trees")):
        with (
            one_order(OrderBounds(memory_bytes=private_bytes() + share * size)),
            pytest.raises(OutOfMemory, match=words),
        ):
            read_graph(tmp_path / "trees.onnx")


@pytest.mark.parametrize(("form", "lacking"), [("torch", "torch"), ("both", "torch"), ("live", "live")])
def test_a_form_that_a_file_does_not_have_is_refused(form: str, lacking: str, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--form", form, "--store", tmp_path / "store")
    assert code == 2 and f"it has no {lacking} form; use --form onnx" in said, (facts, said)
    assert Store(tmp_path / "store").names() == []
