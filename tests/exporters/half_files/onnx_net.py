"""A dense network as an ONNX file, and samples for it."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper


def written(path: Path, loud: float = 1.0) -> Path:
    """A dense network as an ONNX file; with ``loud`` its middle leaves the range of half."""
    random = np.random.default_rng(3)
    weights = {
        "first": (loud * random.normal(size=(16, 32))).astype(np.float32),
        "last": (random.normal(size=(32, 4)) / loud).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], name="first_product"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "last"], ["y"], name="last_product"),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", 16), ("y", 4))
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        ends[:1],
        ends[1:],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def samples(path: Path, rows: int = 24) -> Path:
    np.savez(path, x=np.random.normal(size=(rows, 16)).astype(np.float32))
    return path


def answers(model: ModelProto | Path, x: np.ndarray) -> np.ndarray:
    """The answers of ONNX Runtime with its default settings."""
    file = model if isinstance(model, Path) else model.SerializeToString()
    return np.asarray(onnxruntime.InferenceSession(file).run(None, {"x": x})[0])
