"""Small ONNX files for tests of what is around them."""

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal

MLP = """g (float[n,8] x) => (float[n,4] y)
{ t = Transpose<perm=[1,0]>(w) h = MatMul(x, t) r = Relu(h) y = MatMul(r, v) }"""


def mlp(text: str = MLP, seed: int = 7, more: str = "") -> ModelProto:
    random = np.random.default_rng(seed)
    weights = {"w": normal(random, 16, 8, scale=0.35), "v": normal(random, 16, 4, scale=0.25)}
    return parsed(text, weights, more=more)


def classifier() -> ModelProto:
    """A classifier as scikit-learn's converter writes one: string labels, and a map of probabilities for each row."""
    attributes = {"classlabels_strings": ["a", "b", "c"], "coefficients": [0.5, -1.0, 0.25, 1.0, -0.5, 0.75]}
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["label", "p"], domain="ai.onnx.ml", intercepts=[0.0, 0.1, 0.2],
                         post_transform="SOFTMAX", **attributes),
        helper.make_node("ZipMap", ["p"], ["probabilities"], domain="ai.onnx.ml", classlabels_strings=["a", "b", "c"]),
    ]  # fmt: skip
    table = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    )
    outputs = [
        helper.make_tensor_value_info("label", TensorProto.STRING, [None]),
        helper.make_value_info("probabilities", table),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])], outputs
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)], ir_version=3)
