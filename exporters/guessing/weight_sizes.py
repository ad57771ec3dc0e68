"""Sizes that a graph's constants ask of what they meet: a product with 1575 rows takes 1575 numbers."""

from collections.abc import Iterator, Sequence

from onnx import GraphProto, NodeProto

from ..onnx.reading.graph import attribute

MOST = 8  # sizes that are read
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "PRelu", "Max", "Min"}
_RECURRENT = {"LSTM", "GRU", "RNN"}
_PER_CHANNEL = {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"}


def weight_sizes(graph: GraphProto) -> list[int]:
    """The first `MOST` different sizes of more than 1, in the order of the nodes."""
    dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        value = attribute(node, "value") if node.op_type == "Constant" else None
        if value is not None:
            dims[node.output[0]] = tuple(value.dims)  # type: ignore[attr-defined]
    found = (size for node in graph.node for size in _asked(node, [dims.get(name) for name in node.input]))
    return list(dict.fromkeys(size for size in found if size > 1))[:MOST]


def _asked(node: NodeProto, dims: Sequence[Sequence[int] | None]) -> Iterator[int]:
    """Sizes of the node's other inputs; ``dims``: the shapes of those of its inputs that are constants."""
    second = dims[1] if len(dims) > 1 else None
    if node.op_type == "MatMul" and second and len(second) > 1:
        yield second[-2]
    elif node.op_type == "MatMul" and dims[0]:
        yield dims[0][-1]
    elif node.op_type == "Gemm" and second:
        yield second[1 if attribute(node, "transB", 0) else 0]
    elif node.op_type == "Conv" and second:
        groups = attribute(node, "group", 1)
        assert isinstance(groups, int)
        yield second[1] * groups
    elif node.op_type in _RECURRENT and second:
        yield second[2]
    elif node.op_type in _PER_CHANNEL and second:
        yield second[-1]
    elif node.op_type in _ELEMENTWISE:
        yield from (size for one in dims if one for size in one)
