"""Reads likely sizes of a graph's inputs from its constants: if a weight has 1575 rows, a row of the input that is
multiplied by it has 1575 numbers."""

from collections.abc import Iterator, Sequence

from onnx import GraphProto, NodeProto, TensorProto

from ..onnx.reading.graph import attribute

MOST = 8  # sizes that are read
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "PRelu", "Max", "Min"}
# op → (a constant among its inputs, the axis of it that is as long as an axis of another input)
_ALIKE = {
    "MatMul": ((1, -2), (0, -1)),
    "LSTM": ((1, 2),),
    "GRU": ((1, 2),),
    "RNN": ((1, 2),),
    "BatchNormalization": ((1, 0),),
    "InstanceNormalization": ((1, 0),),
    "GroupNormalization": ((1, 0),),
    "LayerNormalization": ((1, -1),),
}


def weight_sizes(graph: GraphProto) -> list[int]:
    """The first `MOST` different sizes of more than 1, in the order of the nodes."""
    shapes: dict[str, Sequence[int]] = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        value = attribute(node, "value") if node.op_type == "Constant" else None
        if isinstance(value, TensorProto):
            shapes[node.output[0]] = value.dims
    found = (
        size for node in graph.node for size in _asked(node, [shapes.get(name, ()) for name in node.input])
    )
    return list(dict.fromkeys(size for size in found if size > 1))[:MOST]


def _asked(node: NodeProto, shapes: Sequence[Sequence[int]]) -> Iterator[int]:
    """``shapes``: of the node's inputs that are constants; empty for the others."""
    if node.op_type in _ELEMENTWISE:
        yield from (size for shape in shapes for size in shape)
        return
    places, times = _ALIKE.get(node.op_type, ()), 1
    if node.op_type == "Gemm":
        places = ((1, 1 if attribute(node, "transB", 0) else 0),)
    elif node.op_type == "Conv":
        group = attribute(node, "group", 1)
        places, times = ((1, 1),), group if isinstance(group, int) else 1
    for place, axis in places:
        shape = shapes[place] if place < len(shapes) else ()
        if -len(shape) <= axis < len(shape):
            yield shape[axis] * times
