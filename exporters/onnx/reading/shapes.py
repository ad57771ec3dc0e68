"""Sizes that follow from the declared shapes become constants: the width of a head, and the scale made from it.

Exporters compute `1 / sqrt(shape(x)[-1])` at every call. Sizes that ONNX's shape inference finds hold for the half too;
a size that depends on a free dimension stays. onnxscript's `fold_constants` leaves `Gather(Shape(x), -1)` where another
dimension of x is free.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorShapeProto, helper

from .graph import Names, attribute, drop_unread, names_in, rename_reads, to_proto

_SHOWN = 1 << 12  # bytes: constants up to this size may be sizes themselves
Sizes = Sequence[int | None]


def settle_sizes(model: ModelProto, weights: dict[str, np.ndarray]) -> bool:
    """Make constants of the known sizes in the main graph, added to ``weights``; gives whether there were any."""
    graph = model.graph
    if not any(node.op_type == "Shape" for node in graph.node):
        return False
    known = known_shapes(model, weights)
    sizes = {
        node.output[0]: _cut(known[node.input[0]], node)
        for node in graph.node
        if node.op_type == "Shape" and node.input[0] in known
    }
    before = len(weights)
    outputs, names = {value.name for value in graph.output}, Names({*names_in(graph), *weights})
    for node in graph.node:
        value = _value(node, sizes, weights)
        if value is not None and node.output[0] not in outputs:
            constant = names.fresh(f"{node.output[0]}__size")
            weights[constant] = value
            rename_reads(graph, node.output[0], constant)
    drop_unread(graph)
    return len(weights) > before


def _value(
    node: NodeProto, sizes: Mapping[str, Sizes], weights: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """The result of a Shape, or of a Gather of one; None where it is not known."""
    if node.op_type == "Shape":
        found = sizes.get(node.output[0], (None,))
        return None if None in found else np.array(found, np.int64)
    index = weights.get(node.input[1]) if node.op_type == "Gather" else None
    if index is None or node.input[0] not in sizes or attribute(node, "axis", 0) != 0:
        return None
    known = sizes[node.input[0]]
    picked = [known[place] if -len(known) <= place < len(known) else None for place in index.reshape(-1)]
    return None if None in picked else np.array(picked, np.int64).reshape(index.shape)


def _cut(shape: Sizes, node: NodeProto) -> Sizes:
    start, end = attribute(node, "start", 0), attribute(node, "end", len(shape))
    assert isinstance(start, int) and isinstance(end, int)
    return shape[slice(start, end)]


def known_shapes(model: ModelProto, weights: Mapping[str, np.ndarray]) -> dict[str, Sizes]:
    """Value → its sizes, None for a free one. Without those of values whose rank is not known."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for name, array in weights.items():
        if array.dtype == object:
            continue
        if array.nbytes <= _SHOWN:
            bare.graph.initializer.append(to_proto(name, array))
        else:
            type_ = helper.np_dtype_to_tensor_dtype(array.dtype)
            bare.graph.input.append(helper.make_tensor_value_info(name, type_, array.shape))
    found = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    return {
        value.name: [_size(dim) for dim in value.type.tensor_type.shape.dim]
        for value in (*found.input, *found.value_info)
        if value.type.tensor_type.HasField("shape")
    }


def _size(dim: TensorShapeProto.Dimension) -> int | None:
    return dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None
