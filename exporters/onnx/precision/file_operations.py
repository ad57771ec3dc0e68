"""The operations of a foreign ONNX graph, counted in one run: loops and branches as the inputs have them."""

from collections.abc import Mapping

import numpy as np
from onnx import NodeProto

from ....models.errors import ExportFailed
from ...operations import UNKNOWN, Counted, Operations, Shape
from ..reading.graph import ForeignProgram, walk
from .oracle import Oracle


def file_operations(program: ForeignProgram, inputs: Mapping[str, np.ndarray]) -> Operations:
    """The operations of any execution of a normalised program, estimated from one on ``inputs``.

    `UNKNOWN` where ONNX Runtime cannot run one of its nodes by itself: such a file is not planned.
    """
    counted = Counted()
    makers: dict[str, NodeProto] = {node.output[0]: node for node in walk(program.model.graph) if node.output}
    shapes: dict[str, Shape] = {name: array.shape for name, array in program.weights.items()}

    def observe(name: str, array: np.ndarray, type_: int) -> None:
        shapes[name] = array.shape
        if (node := makers.get(name)) is not None:
            counted.add(node.op_type, [shapes[read] for read in node.input if read in shapes], [array.shape])

    try:
        Oracle(program.model, program.weights, observe=observe).run(inputs)
    except ExportFailed:
        return UNKNOWN
    return counted.estimate(sum(array.size for array in inputs.values()))
