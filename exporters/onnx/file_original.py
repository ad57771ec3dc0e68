"""An FP32 ONNX file whose run can be changed at a node (`graph.original_graph.OriginalGraph`)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..graph.backend import GraphNode, Observe
from ..graph.original_graph import Visit
from ..question import Answers, Arrays
from .precision.file_graph import by_node, nodes_of
from .precision.oracle import Oracle
from .precision.watched_run import WatchedRun
from .reading.graph import ForeignProgram, assembled, read_by


@dataclass(frozen=True, slots=True)
class FileOriginal:
    """An ONNX file. ``program`` is the file as it was read, before any mask of it is rewritten."""

    program: ForeignProgram

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.program)

    def makers(self) -> dict[str, str]:
        graph = self.program.model.graph
        makers = {output: node.name for node in graph.node for output in node.output}
        return {value.name: makers[value.name] for value in graph.output if value.name in makers}

    def watched(self, inputs: Arrays, visit: Visit) -> Arrays:
        graph = self.program.model.graph
        makers = {output: node.name for node in graph.node for output in node.output}
        read = {name for node in graph.node for name in read_by(node)} | {
            value.name for value in graph.output
        }

        def see(name: str, value: object, rest: Callable[[np.ndarray], Arrays]) -> None:
            if name in read and isinstance(value, np.ndarray) and value.dtype.kind == "f":
                visit(makers[name], value, lambda changed: rest(_as(changed, value)))

        return Oracle(self.program.model, self.program.weights).run(inputs, see)

    def as_served(self, observe: Observe) -> Answers:
        model = self.program.model
        return Oracle(model, self.program.weights, observe=by_node(model, observe)).run

    def otherwise(self, observe: Observe) -> Answers:
        """The answers as ONNX Runtime runs the file: with its sums in another order than node by node."""
        graph = self.program.model.graph
        makers = {output: node.name for node in graph.node for output in node.output if output}
        watched = WatchedRun(assembled(self.program.model, self.program.weights), list(makers))

        def answer(inputs: Arrays) -> dict[str, np.ndarray]:
            found = watched(inputs)
            for name, node in makers.items():
                if name in found and found[name].dtype.kind == "f":
                    observe(node, found[name])
            return {value.name: found[value.name] for value in graph.output}

        return answer


def _as(changed: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.asarray(changed, value.dtype).reshape(value.shape)
