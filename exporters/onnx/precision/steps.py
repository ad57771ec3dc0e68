"""The steps of an ONNX file (`gate/steps.py`), and its runs that show them."""

import numpy as np
from onnx import ModelProto, TensorProto

from ...gate.steps import Made, Rest, See, steps_behind
from ...question import Arrays
from ..reading.graph import ONNX, read_by
from ..reading.typing import value_types
from .oracle import Oracle

_FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}


class FileSteps:
    """Finds the steps of a file, whose constants are ``weights``, and runs it (`gate.steps.Steps`). ``outputs``: the
    steps of each output that has some."""

    def __init__(self, model: ModelProto, weights: Arrays) -> None:
        self._model, self._weights = model, weights
        self._makers = {name: node for node in self._model.graph.node for name in node.output if name}
        self._types = value_types(self._model, self._weights)
        found = {value.name: steps_behind(value.name, self._made) for value in self._model.graph.output}
        self.outputs = {name: steps for name, steps in found.items() if steps}
        self._steps = {step for steps in self.outputs.values() for step in steps}
        self._oracle: Oracle | None = None

    def _made(self, name: str) -> Made[str]:
        node, is_whole = self._makers.get(name), self._types.get(name) not in _FLOATS
        if node is None or node.domain not in ONNX:
            return Made("" if node is None else node.op_type, (), is_whole)
        inputs = (each for each in sorted(read_by(node)) if each not in self._weights)
        return Made(node.op_type, tuple(inputs), is_whole)

    def run(self, inputs: Arrays, see: See[str]) -> None:
        """Run the file; ``see`` is shown each step."""
        self._oracle = self._oracle or Oracle(self._model, self._weights)
        read = {name for step in self._steps for name in self._makers[step].input if name}
        known = {name: array for name, array in (*self._weights.items(), *inputs.items()) if name in read}

        def visit(name: str, value: np.ndarray, rest: Rest) -> None:
            if name in read:
                known[name] = value
            if name in self._steps:
                see(name, [known[each] for each in self._makers[name].input if each], value, rest)

        self._oracle.run(inputs, visit)
