"""Sequences that only carry the parts of a split to their readers, as torch.onnx writes torch.split, become a Split.

onnxscript's `fold_constants` does so too, but not without its other changes: see `folding.py`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from .graph import ONNX, Names, attribute, graphs, names_in, small_constants

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
Shapes = Mapping[str, list[int]]  # 0 where a size is free


def unfold(model: ModelProto) -> None:
    """Where all readers of a SplitToSequence are SequenceAt of constant places, one Split takes its place."""
    names = Names(names_in(model.graph))
    for graph in graphs(model.graph):
        shapes, constants = _shapes(graph), small_constants(graph, _INTEGERS)
        for node in [node for node in graph.node if _is(node, "SplitToSequence")]:
            readers = [
                reader for part in graphs(graph) for reader in part.node if node.output[0] in reader.input
            ]
            places = [_place(graph, constants, reader) for reader in readers]
            sizes = _sizes(node, shapes, constants)
            if sizes is not None and all(place is not None for place in places):
                _replace(graph, node, sizes, list(zip(places, readers, strict=True)), names)


def _replace(
    graph: GraphProto,
    node: NodeProto,
    sizes: list[int],
    readers: Sequence[tuple[int | None, NodeProto]],
    names: Names,
) -> None:
    parts = [names.fresh(f"{node.output[0]}__{index}") for index in range(len(sizes))]
    given = names.fresh(f"{node.output[0]}__sizes")
    graph.initializer.append(numpy_helper.from_array(np.asarray(sizes, np.int64), given))
    axis = attribute(node, "axis", 0)
    node.CopyFrom(helper.make_node("Split", [node.input[0], given], parts, name=node.name, axis=axis))
    for place, reader in readers:
        assert place is not None
        identity = helper.make_node("Identity", [parts[place]], list(reader.output), name=reader.name)
        reader.CopyFrom(identity)


def _sizes(node: NodeProto, shapes: Shapes, constants: Mapping[str, np.ndarray]) -> list[int] | None:
    """The sizes of the parts, where the file has them; a single number is the size of all parts but the last."""
    given = constants.get(node.input[1]) if len(node.input) > 1 else None
    if given is None:
        return None
    if given.ndim == 1:
        return [int(size) for size in given]
    shape, axis, size = shapes.get(node.input[0], []), attribute(node, "axis", 0), int(given)
    assert isinstance(axis, int)
    whole = shape[axis] if -len(shape) <= axis < len(shape) else 0
    return [min(size, whole - start) for start in range(0, whole, size)] or None


def _place(graph: GraphProto, constants: Mapping[str, np.ndarray], reader: NodeProto) -> int | None:
    if not _is(reader, "SequenceAt") or not any(reader is node for node in graph.node):
        return None
    place = constants.get(reader.input[1])
    return None if place is None else int(place.reshape(-1)[0])


def _is(node: NodeProto, op: str) -> bool:
    return node.op_type == op and node.domain in ONNX


def _shapes(graph: GraphProto) -> dict[str, list[int]]:
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info)
    }
