"""The element type of every value, bodies included, from ONNX's own rules for each op."""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto

from .graph import BODIES, bodies, element_type
from .one_node import key_of, output_types


def value_types(model: ModelProto, weights: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Value name → element type. Names are unique over all graphs. Raises ValueError for an unknown op."""
    types = {name: element_type(array) for name, array in weights.items()}
    _Typing(model, types).graph(model.graph)
    return types


class _Typing:
    def __init__(self, model: ModelProto, types: dict[str, int]) -> None:
        self.model, self.types = model, types

    def graph(self, graph: GraphProto) -> list[int]:
        for value in graph.input:
            self.types.setdefault(value.name, value.type.tensor_type.elem_type)
        for node in graph.node:
            found = self.control(node) if node.op_type in BODIES and bodies(node) else self.plain(node)
            self.types.update((name, type_) for name, type_ in zip(node.output, found, strict=False) if name)
        return [self.types[value.name] for value in graph.output]

    def plain(self, node: NodeProto) -> tuple[int, ...]:
        types = [self.types.get(name, 0) for name in node.input]
        return output_types(key_of(node, types, self.model.opset_import, self.model.ir_version))

    def control(self, node: NodeProto) -> list[int]:
        """Types go into a body by position: a Loop's after iteration and condition, a Scan's all."""
        found: list[int] = []
        for body in bodies(node).values():
            first = 2 if node.op_type == "Loop" else 0
            for value, name in zip(body.input[first:], node.input[first:], strict=False):
                self.types[value.name] = self.types.get(name, 0)
            found = self.graph(body)
        return found[1:] if node.op_type == "Loop" else found
