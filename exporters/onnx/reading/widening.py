"""The half values of a file, widened to the FP32 original; nodes that the file keeps in FP32 on purpose are noted."""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from .graph import (
    FLOAT,
    HALVES,
    Names,
    attribute,
    graphs,
    names_in,
    rename_everywhere,
    rename_reads,
    replace_all,
    walk,
)
from .typing import value_types

_HALF = frozenset(HALVES.values())
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision")

Widened = tuple[ModelProto, dict[str, np.ndarray], set[str], set[str]]


def widened(model: ModelProto, weights: dict[str, np.ndarray], notes: list[str]) -> Widened:
    """The model without half inside, its weights, the nodes of its own FP32 islands, and its Casts to half.

    Islands: in a file that computes in half somewhere, the nodes that compute in FP32 are taken to be FP32 on purpose.
    A file that only stores weights in half has none. Inputs and outputs keep their datatypes.
    """
    _fold_constant_casts(model, weights)
    types = value_types(model, weights)
    in_half = [name for name, type_ in types.items() if type_ in _HALF]
    if not in_half:
        return model, weights, set(), set()
    stored = [name for name in in_half if name in weights]
    if stored:
        notes.append(f"{len(stored)} half-precision weights of the file were widened to FP32")
    islands, halved = _intentions(model, types, weights)
    wide = {name: _wide_array(array) for name, array in weights.items()}
    for graph in graphs(model.graph):
        _widen(graph, graph is model.graph)
    halved |= cast_at_the_boundary(model)
    if islands:
        notes.append(f"the file computes in half already; {len(islands)} nodes that it has in FP32 stay so")
    return model, wide, islands, halved


def _fold_constant_casts(model: ModelProto, weights: dict[str, np.ndarray]) -> None:
    """Make FP32 weights of weights that are stored in half and cast up by the graph."""
    for graph in graphs(model.graph):
        outputs = {value.name for value in graph.output}
        for node in [node for node in graph.node if node.op_type == "Cast"]:
            array = weights.get(node.input[0])
            if array is None or attribute(node, "to") != FLOAT or node.output[0] in outputs:
                continue
            if helper.np_dtype_to_tensor_dtype(array.dtype) in _HALF:
                weights[node.output[0]] = array.astype(np.float32)
                graph.node.remove(node)


def _intentions(
    model: ModelProto, types: Mapping[str, int], weights: Mapping[str, np.ndarray]
) -> tuple[set[str], set[str]]:
    def has(node: NodeProto, wanted: frozenset[int]) -> bool:
        values = [name for name in (*node.input, *node.output) if name not in weights]
        return any(types.get(name) in wanted for name in values)

    nodes = list(walk(model.graph))
    halved = {n.name for n in nodes if n.op_type == "Cast" and attribute(n, "to") in _HALF}
    computes = [node for node in nodes if node.op_type != "Cast" and has(node, _HALF)]
    islands = {n.name for n in nodes if n.name not in halved and has(n, frozenset({FLOAT}))}
    return (islands if computes else set()), halved


def _wide_array(array: np.ndarray) -> np.ndarray:
    half = array.dtype != object and helper.np_dtype_to_tensor_dtype(array.dtype) in _HALF
    return array.astype(np.float32) if half else array


def _widen(graph: GraphProto, main: bool) -> None:
    for node in graph.node:
        widen_attributes(node)
    for value in () if main else (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _HALF:
            value.type.tensor_type.elem_type = FLOAT


def widen_attributes(node: NodeProto) -> None:
    """Change attributes that name a half type to FP32."""
    for entry in node.attribute:
        if entry.name in _TYPE_ATTRIBUTES and entry.i in _HALF:
            entry.i = FLOAT
        if entry.HasField("t") and entry.t.data_type in _HALF:
            wide = numpy_helper.to_array(entry.t).astype(np.float32)
            entry.t.CopyFrom(numpy_helper.from_array(wide, entry.t.name))


def cast_at_the_boundary(model: ModelProto) -> set[str]:
    """Half inputs are cast up, half outputs down; gives the Casts of inputs, which need not widen.

    A model that computes in FP32 inside, whose inputs or outputs were declared half, is whole again thereby.
    """
    names, down = Names(names_in(model.graph)), set()
    taken = Names(node.name for node in walk(model.graph))
    passed = {value.name for value in model.graph.input} & {value.name for value in model.graph.output}
    before: list[NodeProto] = []
    for value in model.graph.input:
        if value.type.tensor_type.elem_type in _HALF and value.name not in passed:
            wide = names.fresh(f"{value.name}__wide")
            rename_reads(model.graph, value.name, wide)
            cast = helper.make_node("Cast", [value.name], [wide], name=taken.fresh(f"{wide}.cast"), to=FLOAT)
            down.add(cast.name)
            before.append(cast)
    for value in model.graph.output:
        type_ = value.type.tensor_type.elem_type
        if type_ in _HALF and value.name not in passed:
            wide = names.fresh(f"{value.name}__wide")
            rename_everywhere(model.graph, value.name, wide)
            name = taken.fresh(f"{value.name}.cast")
            model.graph.node.append(helper.make_node("Cast", [wide], [value.name], name=name, to=type_))
    replace_all(model.graph.node, [*before, *model.graph.node])
    return down
