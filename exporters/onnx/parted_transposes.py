"""A half file without the pair that ends ONNX Runtime: a half Transpose before the MatMul that reads it.

ONNX Runtime 1.31 ends the process (a segmentation fault) where its optimiser joins the two, with its default settings.
It does so through a Cast, an Identity and a scale between them, too.
halfeven's own engine switches that off. Others open the file of a store as well, so no half file has the pair.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from .reading.graph import ONNX, Names, attribute, graphs, names_in, replace_all

_SEEN_THROUGH = ("Cast", "Identity", "Mul", "Div")


def part_transposes_in(path: Path) -> int:
    """Do what `part_transposes` does for a file, which is written anew if it has such a pair."""
    model = onnx.load(path, load_external_data=False)
    if parted := part_transposes(model):
        onnx.save(model, path)
    return parted


def part_transposes(model: ModelProto) -> int:
    """Put a Reshape that changes nothing between each half Transpose and the MatMul that reads it; gives how many."""
    names, types = Names(names_in(model.graph)), _types(model)
    return sum(_part(graph, model.graph, types, names) for graph in graphs(model.graph))


def _types(model: ModelProto) -> dict[str, int]:
    values = (
        value for graph in graphs(model.graph) for value in (*graph.value_info, *graph.input, *graph.output)
    )
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _part(graph: GraphProto, main: GraphProto, types: dict[str, int], names: Names) -> int:
    made = {node.output[0]: node for node in graph.node if node.output and node.domain in ONNX}
    scales = {one.name for one in (*main.initializer, *graph.initializer) if list(one.dims) in ([], [1])}
    for name, node in made.items():
        value = attribute(node, "value") if node.op_type == "Constant" else None
        if isinstance(value, TensorProto) and list(value.dims) in ([], [1]):
            scales.add(name)

    def rank_of_transposed(name: str) -> int:
        """The rank of ``name`` if a half Transpose gives it, directly or through ops of `_SEEN_THROUGH`; else 0."""
        while (node := made.get(name)) is not None and node.op_type != "Transpose":
            read = [one for one in node.input if one not in scales]
            if node.op_type not in _SEEN_THROUGH or len(read) != 1:
                return 0
            (name,) = read
        order = attribute(node, "perm") if node is not None else None
        is_half = types.get(name, TensorProto.FLOAT16) != TensorProto.FLOAT
        return len(order) if isinstance(order, list) and is_half else 0

    nodes, parted = list[NodeProto](), 0
    for node in graph.node:
        for place, name in enumerate(node.input if node.op_type in ("MatMul", "FusedMatMul") else ()):
            if not (rank := rank_of_transposed(name)):
                continue
            places, same = names.fresh(f"{name}__places"), names.fresh(f"{name}__same")
            main.initializer.append(numpy_helper.from_array(np.zeros(rank, np.int64), places))
            nodes.append(helper.make_node("Reshape", [name, places], [same], same))
            node.input[place] = same
            parted += 1
        nodes.append(node)
    if parted:
        replace_all(graph.node, nodes)
    return parted
