"""Files of ONNX Runtime's optimiser: normalisations in ONNX's own domain that ONNX has later, or not at all."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal


def optimised(norm: str, opset: int, random: np.random.Generator, half: bool = False) -> ModelProto:
    """x → MatMul → ``norm`` → MatMul, as `onnxruntime.transformers` writes them. ``half``: in FP16."""
    kind, dtype = (TensorProto.FLOAT16, np.float16) if half else (TensorProto.FLOAT, np.float32)
    scales = ["g", "b"] if norm == "LayerNormalization" else ["g"]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node(norm, ["h", *scales], ["n"], "norm", axis=-1, epsilon=1e-6, stash_type=1),
        helper.make_node("MatMul", ["n", "w2"], ["y"]),
    ]
    weights = {"w1": normal(random, 16, 32, scale=0.2), "g": 1 + normal(random, 32, scale=0.1),
               "b": normal(random, 32, scale=0.1), "w2": normal(random, 32, 8, scale=0.2)}  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, ["n", 16])],
        [helper.make_tensor_value_info("y", kind, ["n", 8])],
        [numpy_helper.from_array(weights[name].astype(dtype), name) for name in ("w1", *scales, "w2")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "opset", "half"),
    [
        ("LayerNormalization", 14, False),
        ("LayerNormalization", 14, True),
        ("SimplifiedLayerNormalization", 14, False),
        ("SimplifiedLayerNormalization", 14, True),
        ("SimplifiedLayerNormalization", 18, False),
    ],
)
def test_a_normalisation_that_onnx_does_not_have_there_keeps_nothing_from_being_half(
    norm: str, opset: int, half: bool, tmp_path: Path, random: np.random.Generator
) -> None:
    onnx.save(optimised(norm, opset, random, half), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0, said
    form = facts["forms"]["onnx"]
    assert form["half_nodes"] >= 2 and not form["kept"], facts["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "scales"), [(18, 2), (20, 2), (21, 8), (23, 8)])
def test_a_group_norm_without_a_rule_of_inference_keeps_nothing_from_being_half(
    opset: int, scales: int, tmp_path: Path, random: np.random.Generator
) -> None:
    """ONNX has no rule for the types that a GroupNormalization gives, and withdrew that of opset 18."""
    weights = {"k": normal(random, 8, 8, 1, 1), "k1": normal(random, 4, 8, 1, 1), "s": 1 + normal(random, scales),
               "b": normal(random, scales)}  # fmt: skip
    text = "g (float[n,8,4,4] x) => (float[n,4,4,4] y) { c = Conv(x, k) m = GroupNormalization<num_groups=2>(c, s, b) r = Relu(m) y = Conv(r, k1) }"  # noqa: E501
    onnx.save(parsed(text, weights, opset), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    form = facts["forms"]["onnx"]
    assert code == 0 and form["half_nodes"] >= 3 and not form["kept"], (said, form)
    x = random.standard_normal((2, 8, 4, 4), np.float32)
    original = next((tmp_path / "store").rglob("original.onnx"))
    came, expected = (
        np.asarray(onnxruntime.InferenceSession(path).run(None, {"x": x})[0])
        for path in (original, tmp_path / "net.onnx")
    )
    np.testing.assert_allclose(came, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_norm_over_default_axes_keeps_nothing_from_being_half(
    tmp_path: Path, random: np.random.Generator
) -> None:
    text = "g (float[n,4,4,16] x) => (float[n,4,4,8] y) { a = MeanVarianceNormalization(x) y = MatMul(a, w) }"
    onnx.save(parsed(text, {"w": normal(random, 16, 8)}), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"], said
