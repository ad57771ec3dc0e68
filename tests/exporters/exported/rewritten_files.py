"""ONNX files of one graph each, rewritten for TensorRT, and their answers in ONNX Runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
from halfeven.exporters.exported.tensorrt_operators import LackingOperation, rewrite_for_tensorrt
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.reading import large_files

Array = np.ndarray
TYPES = {
    "float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "double": np.float64,
    "int64": np.int64, "int32": np.int32, "int8": np.int8,
}  # fmt: skip


class File:
    """``graph``: in the text form of ``onnx.parser``."""

    def __init__(self, folder: Path, graph: str, opset: int = 18) -> None:
        self.path = folder / "model.onnx"
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {graph}')
        large_files.save(model, self.path)

    def answer(self, inputs: Mapping[str, Array]) -> Array:
        """The first output."""
        return self.answers(inputs)[0]

    def answers(self, inputs: Mapping[str, Array]) -> list[Array]:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
        return list(map(np.asarray, session.run(None, dict(inputs))))

    def rewrite(self, inputs: Mapping[str, Array], rows: int = 0) -> list[LackingOperation]:
        """``inputs``: of one call; with ``rows``, the largest batch, its first axis is the batch."""
        samples = dict(inputs) if rows else {name: array[None] for name, array in inputs.items()}
        return rewrite_for_tensorrt(self.path, Samples(samples), rows)

    @property
    def operations(self) -> list[str]:
        return [node.op_type for node in onnx.load(self.path).graph.node]


def is_rewritten(found: Sequence[LackingOperation]) -> bool:
    """True if the file had such operations, and each is rewritten."""
    return bool(found) and not any(operation.left_because for operation in found)


def drawn(random: np.random.Generator, shape: Sequence[int], type_: str = "float") -> Array:
    if type_.startswith("int"):
        return random.integers(-99, 99, shape).astype(TYPES[type_])
    return random.standard_normal(shape).astype(TYPES[type_])
