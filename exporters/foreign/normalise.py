"""From the file's graph to the one that everything works on (`graph.ForeignProgram`).

Functions are inlined, an old opset is converted up, nodes are sorted and named, every value has a name of its
own in all graphs, constants are taken out, and what the file has in half is widened to the FP32 whole.
"""

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.version_converter import convert_version

from ...models.errors import BadFolder
from .folding import fold
from .graph import (
    BODIES,
    ONNX,
    ForeignProgram,
    Names,
    attribute,
    bodies,
    graphs,
    names_in,
    opset_of,
    read_by,
    walk,
)
from .reading import check
from .sequences import unfold
from .typing import value_types
from .widening import widened

OLDEST = 13  # below it too many ops take no half
TARGET = 17
_SEQUENCES = ("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence", "StringSplit")


def normalise(model: ModelProto, path: Path) -> ForeignProgram:
    """Raises BadFolder for what is not valid or not taken, naming the construct."""
    notes: list[str] = []
    for graph in graphs(model.graph):
        sort(graph, path)
    check(path, model)
    if model.functions:
        notes.append(f"{len(model.functions)} local functions were inlined")
        model = inline_local_functions(model)
        for graph in graphs(model.graph):
            sort(graph, path)
    model = _raise_opset(model, path, notes)
    unfold(model)
    _refuse_what_is_not_taken(model, path)
    _close(model)
    _rename(model)
    weights = _lift(model)
    model.ir_version = min(max(model.ir_version, 8), 10)  # 10: what runtimes of the last years read
    for stale in (model.graph.value_info, model.metadata_props, model.graph.quantization_annotation):
        del stale[:]
    model = ModelProto.FromString(model.SerializeToString())  # frees the constants that were in the old one
    model, weights, islands, halved = widened(model, weights, notes)
    fold(model, weights)
    return ForeignProgram(
        model, weights, value_types(model, weights), frozenset(islands), frozenset(halved), tuple(notes)
    )


def sort(graph: GraphProto, path: Path) -> None:
    """Order a graph's nodes so that each stands after what it reads; nodes keep their order where they can."""
    made_by = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    waits = [{made_by[name] for name in read_by(node) if name in made_by} for node in graph.node]
    readers: dict[int, list[int]] = {}
    for index, sources in enumerate(waits):
        for source in sources:
            readers.setdefault(source, []).append(index)
    ready = [index for index, sources in enumerate(waits) if not sources]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers.get(index, ()):
            waits[reader].discard(index)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(graph.node):
        stuck = next(node for index, node in enumerate(graph.node) if waits[index])
        raise BadFolder(f"{path}: the graph runs in a circle through '{stuck.name or stuck.op_type}'")
    if order != sorted(order):
        nodes = [graph.node[index] for index in order]
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _raise_opset(model: ModelProto, path: Path, notes: list[str]) -> ModelProto:
    version = opset_of(model)
    if version >= OLDEST:
        return model
    try:
        converted = convert_version(model, TARGET)
        onnx.checker.check_model(converted)
    except Exception as error:
        raise BadFolder(
            f"{path} is of opset {version}, too old for half precision, and cannot be converted to {TARGET}: "
            f"{str(error)[:300]}; export it again with opset {TARGET} or later"
        ) from error
    notes.append(f"opset {version} was converted to {TARGET}: older ones take too few ops in half")
    return converted


def _refuse_what_is_not_taken(model: ModelProto, path: Path) -> None:
    if any(graph.sparse_initializer for graph in graphs(model.graph)):
        raise BadFolder(f"{path} has sparse initialisers, which are not taken: save them dense")
    for node in walk(model.graph):
        if node.domain in ONNX and node.op_type.startswith(_SEQUENCES):
            raise BadFolder(
                f"{path}: node '{node.name}' is a {node.op_type}; sequences and optionals are not taken"
            )
        if bodies(node) and node.op_type not in BODIES:
            raise BadFolder(f"{path}: node '{node.name}' is a {node.op_type}, whose body is not looked into")


def _close(model: ModelProto) -> None:
    """Every output of every graph is made by a node of that very graph, and no value is two outputs."""
    names = Names(names_in(model.graph))
    for graph in graphs(model.graph):
        made = {name for node in graph.node if node.op_type != "Constant" for name in node.output}
        inputs = {value.name for value in graph.input}
        main = graph is model.graph
        for value in graph.output:
            if value.name in made:
                made.discard(value.name)
            elif not main:
                own = names.fresh(f"{value.name}__out")
                graph.node.append(helper.make_node("Identity", [value.name], [own]))
                value.name = own
            elif value.name not in inputs:
                _hand_out_constant(graph, value.name, names)


def _hand_out_constant(graph: GraphProto, name: str, names: Names) -> None:
    """An output of the model that is a constant keeps its name; the constant gets another."""
    inner = names.fresh(f"{name}__value")
    for tensor in graph.initializer:
        if tensor.name == name:
            tensor.name = inner
    _substitute(graph, {name: inner}, outputs=False)
    graph.node.append(helper.make_node("Identity", [inner], [name]))


def _substitute(graph: GraphProto, renamed: Mapping[str, str], outputs: bool = True) -> None:
    """Rename values in a graph and in what its bodies capture."""
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        for body in bodies(node).values():
            _substitute(body, renamed)
    if outputs:
        for value in graph.output:
            value.name = renamed.get(value.name, value.name)


def _rename(model: ModelProto) -> None:
    """Names that are unique over all graphs, for values and for nodes; those of the main graph stay."""
    main = model.graph
    own = {value.name for value in (*main.input, *main.output, *main.initializer)}
    values = Names(own | {name for node in main.node for name in node.output})
    _rename_nodes(main, "", Names())
    for node in main.node:
        for body in bodies(node).values():
            _rename_body(body, {}, values)


def _rename_nodes(graph: GraphProto, prefix: str, names: Names) -> None:
    for node in graph.node:
        node.name = names.fresh(prefix + (node.name or node.op_type.lower()))
    for node in graph.node:
        for which, body in bodies(node).items():
            _rename_nodes(body, f"{node.name}.{which}.", names)


def _rename_body(graph: GraphProto, outer: Mapping[str, str], names: Names) -> None:
    own = [value.name for value in (*graph.input, *graph.initializer)]
    own += [name for node in graph.node for name in node.output if name]
    renamed = {**outer, **{name: names.fresh(name) for name in own}}
    for value in (*graph.input, *graph.initializer, *graph.output):
        value.name = renamed.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        for body in bodies(node).values():
            _rename_body(body, renamed, names)
    del graph.value_info[:]


def _lift(model: ModelProto) -> dict[str, np.ndarray]:
    """Take all constants out of all graphs; an initialiser that was an input as well is no input any more."""
    weights: dict[str, np.ndarray] = {}
    for graph in graphs(model.graph):
        mine = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in ONNX and (value := _constant(node)) is not None:
                mine[node.output[0]] = value
        kept = [n for n in graph.node if not (n.op_type == "Constant" and n.output[0] in mine)]
        inputs = [value for value in graph.input if value.name not in mine]
        _replace(graph.node, kept)
        _replace(graph.input, inputs)
        del graph.initializer[:]
        weights |= mine
    return weights


def _replace(field, items: Sequence) -> None:  # type: ignore[no-untyped-def]
    """Give a repeated protobuf field these of its items."""
    if len(field) == len(items):
        return
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def _constant(node: NodeProto) -> np.ndarray | None:
    entry = node.attribute[0]
    value = attribute(node, entry.name)
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if entry.name in ("value_float", "value_floats"):
        return np.asarray(value, np.float32)
    if entry.name in ("value_int", "value_ints"):
        return np.asarray(value, np.int64)
    return None
