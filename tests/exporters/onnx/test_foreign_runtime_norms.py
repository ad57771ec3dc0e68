"""Files of ONNX Runtime's optimiser: normalisations in ONNX's own domain that ONNX has later, or not at all."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.exporters.onnx.traps import normal
from tests.serve.cli.test_main import run


def optimised(norm: str, opset: int, random: np.random.Generator, half: bool = False) -> ModelProto:
    """x → MatMul → ``norm`` → MatMul, as `onnxruntime.transformers` writes it. ``half``: it made the file half."""
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
