"""The treatment of FP16 by ONNX Runtime's CPU provider, asked of the one that is installed and of this processor.

docs/precision.md rests on it: answers of that provider say nothing of values that are stored in FP16. Asked where the
processor multiplies no FP16 itself; for others (ARM64) ONNX Runtime may have kernels that sum and store in FP16.
"""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.models.machine.processor import this_processor
from onnx import TensorProto, helper, numpy_helper

U = 2.0**-11
HALF = TensorProto.FLOAT16
ALL, NONE = (
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
)
pytestmark = pytest.mark.skipif(
    this_processor().machine not in ("x86_64", "AMD64") or this_processor().fp16_units,
    reason="this processor multiplies FP16 itself",
)


def answer(
    nodes: list[onnx.NodeProto], x: np.ndarray, constants: dict[str, np.ndarray], level: Any
) -> np.ndarray:
    inputs = [helper.make_tensor_value_info("x", HALF, list(x.shape))]
    outputs = [helper.make_tensor_value_info("y", HALF, None)]
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "half", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.intra_op_num_threads = level, 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_products_in_fp16_are_summed_in_fp32(op: str, random: np.random.Generator) -> None:
    """One rounding at the end: half a unit, and a little for the sums. ONNX Runtime 1.29.0 summed a Gemm in FP16 (up to
    31u here), and took 84 to 645 times as long as in FP32."""
    depth = 2048
    x = random.standard_normal((32, depth)).astype(np.float16)
    w = (random.standard_normal((depth, 64)) / np.sqrt(depth)).astype(np.float16)
    y = answer([helper.make_node(op, ["x", "w"], ["y"])], x, {"w": w}, ALL)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert np.abs(y - exact).max() <= 1.5 * U * np.abs(exact).max()


@pytest.mark.parametrize("level", [NONE, ALL])
def test_a_value_that_fp16_cannot_hold_passes_between_two_nodes(level: Any) -> None:
    """``1 · 1000 · 1000 · 0.001 · 0.001``: stored in FP16, it would be infinite."""
    constants = {"much": np.array(1000, np.float16), "little": np.array(0.001, np.float16)}
    factors = ["much", "much", "little", "little"]
    names = ["x", "a", "b", "c", "y"]
    nodes = [
        helper.make_node("Mul", [names[step], factor], [names[step + 1]])
        for step, factor in enumerate(factors)
    ]
    y = answer(nodes, np.ones((2, 4), np.float16), constants, level)
    assert np.allclose(y, 1, rtol=4 * U)
