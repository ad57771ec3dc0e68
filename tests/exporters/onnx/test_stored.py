"""A file of the store is run node by node, whatever its bodies hold."""

import numpy as np
import pytest
from halfeven.exporters.onnx.stored import half_storage
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from onnx import TensorProto, helper, numpy_helper

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
SPEC = ModelSpec("m", (TensorSpec("x", "FP32", (Dim(),)),), (TensorSpec("y", "FP32", (Dim(),)),), 0)


def branch(name: str, number: float) -> object:
    """x + number; both branches call the constant and the sum by the same names."""
    return helper.make_graph(
        [helper.make_node("Add", ["h", "number"], ["sum"])],
        name,
        [],
        [helper.make_tensor_value_info("sum", HALF, ["n"])],
        [numpy_helper.from_array(np.array([number], np.float16), "number")],
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constants_in_the_bodies_of_a_half_are_its_own(sign: float) -> None:
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Greater", ["largest", "zero"], ["positive"]),
        helper.make_node("Cast", ["x"], ["h"], to=HALF),
        helper.make_node(
            "If",
            ["positive"],
            ["chosen"],
            then_branch=branch("then", 2048.0),
            else_branch=branch("else", 1.0),
        ),
        helper.make_node("Cast", ["chosen"], ["y"], to=FLOAT),
    ]
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["n"])]
    outputs = [helper.make_tensor_value_info("y", FLOAT, ["n"])]
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    graph = helper.make_graph(nodes, "main", inputs, outputs, [zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = sign * np.array([1.0, 3.0], np.float32)
    # Half has steps of 2 there: 2049 and 2051 are rounded
    wanted = [2048.0, 2052.0] if sign > 0 else [0.0, -2.0]
    assert half_storage(model, SPEC)({"x": x})["y"].tolist() == wanted
