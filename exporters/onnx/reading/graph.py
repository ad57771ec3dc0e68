"""A normalised ONNX graph, on which the other files of this package work: one opset, unique names, constants apart."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
HALVES: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
FLOATING = frozenset({FLOAT, TensorProto.DOUBLE, *HALVES.values()})
BODIES = ("If", "Loop", "Scan")  # the ops whose bodies are planned too
ONNX = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class ForeignProgram:
    """The FP32 original. Every value and every node, bodies included, has a unique name.

    ``model`` holds the nodes and no constants; ``weights`` holds the constants of all graphs by value name.
    ``types``: value → ONNX element type (0: no tensor). ``islands``: nodes that the file itself keeps in FP32;
    ``halved``: Cast nodes by which the file itself goes to half. ``given``: the names, operators and outputs of the
    file's own nodes, some of which are constants, other nodes or left out here; of a function's nodes no outputs.
    """

    model: ModelProto
    weights: Mapping[str, np.ndarray]
    types: Mapping[str, int]
    islands: frozenset[str] = frozenset()
    halved: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())
    given: tuple[NodeProto, ...] = field(default=(), repr=False)

    @property
    def graph(self) -> GraphProto:
        return self.model.graph

    @property
    def nodes(self) -> list[NodeProto]:
        return list(walk(self.graph))

    @property
    def opset(self) -> int:
        return opset_of(self.model)

    def is_float(self, name: str) -> bool:
        return self.types.get(name) == FLOAT


def opset_of(model: ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ONNX), 1)


def bodies(node: NodeProto) -> dict[str, GraphProto]:
    """The graphs among a node's attributes, by attribute name."""
    return {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}


def attribute(node: NodeProto, name: str, default: object = None) -> object:
    found = next((entry for entry in node.attribute if entry.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def operations_by_name(graph: GraphProto) -> list[tuple[str, str]]:
    """The name and the operation of each node, those of bodies too; a node without a name has that of its output."""

    def operation(node: NodeProto) -> str:
        trains = node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]
        trains = trains or (node.op_type == "BatchNormalization" and attribute(node, "training_mode"))
        return f"{node.op_type} in training" if trains else node.op_type

    return [(node.name or node.output[0], operation(node)) for node in walk(graph)]


def walk(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Every node in order; those of a body stand before the node that has it."""
    for node in graph.node:
        for body in bodies(node).values():
            yield from walk(body)
        yield node


def rename_reads(graph: GraphProto, old: str, new: str) -> None:
    """Let all nodes of a graph and its bodies read ``new`` in place of ``old``, and the bodies give it."""
    for node in walk(graph):
        node.input[:] = [new if name == old else name for name in node.input]
        for value in (value for body in bodies(node).values() for value in body.output):
            value.name = new if value.name == old else value.name


def rename_everywhere(graph: GraphProto, old: str, new: str) -> None:
    """Rename a value; declared inputs and outputs of the graph itself keep their names."""
    rename_reads(graph, old, new)
    for node in walk(graph):
        node.output[:] = [new if name == old else name for name in node.output]


def replace_all(field: Any, values: Iterable[Any]) -> None:
    """Replace what a repeated field of a protobuf message holds by copies of ``values``, which may be of this field."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)


def small_constants(graph: GraphProto, types: Collection[int]) -> dict[str, np.ndarray]:
    """The graph's initialisers and Constant nodes of these element types that have at most one axis, by name."""
    values = [(tensor.name, tensor) for tensor in graph.initializer]
    for node in graph.node:
        value = attribute(node, "value") if node.op_type == "Constant" and node.domain in ONNX else None
        if isinstance(value, TensorProto):
            values.append((node.output[0], value))
    return {
        name: numpy_helper.to_array(tensor)
        for name, tensor in values
        if tensor.data_type in types and len(tensor.dims) <= 1
    }


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and all bodies below it."""
    yield graph
    for node in graph.node:
        for body in bodies(node).values():
            yield from graphs(body)


def captured(graph: GraphProto) -> set[str]:
    """The outer values that a body reads."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    read: set[str] = set()
    for node in graph.node:
        read |= read_by(node)
        own |= set(node.output)
    return (read | {value.name for value in graph.output}) - own


def read_by(node: NodeProto) -> set[str]:
    """The values that a node reads, those that its bodies capture included."""
    return set(node.input).union(*(captured(body) for body in bodies(node).values())) - {""}


def drop_unread(graph: GraphProto) -> set[str]:
    """Take out the nodes and constants that no output needs, in any order of the nodes; gives the names of the values
    that outputs need."""
    made_by = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needed, waiting = set[str](), [value.name for value in graph.output]
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            waiting += read_by(graph.node[made_by[name]]) if name in made_by else ()
    for index in reversed(range(len(graph.node))):
        if needed.isdisjoint(graph.node[index].output):
            del graph.node[index]
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in needed:
            del graph.initializer[index]
    return needed


def assembled(
    model: ModelProto, weights: Mapping[str, np.ndarray], info: Iterable[onnx.ValueInfoProto] = ()
) -> ModelProto:
    """The model with those constants in it that are read, and with this value_info."""
    original = ModelProto()
    original.CopyFrom(model)
    read = set().union(*(read_by(node) for node in model.graph.node)) | {v.name for v in model.graph.output}
    original.graph.initializer.extend(to_proto(name, weights[name]) for name in weights if name in read)
    original.graph.value_info.extend(info)
    return original


def to_proto(name: str, array: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


def element_type_of(text: str) -> int:
    """The element type in ONNX Runtime's words, such as ``tensor(float)``; 0 where they name no tensor."""
    return dict(TensorProto.DataType.items()).get(text.removeprefix("tensor(").removesuffix(")").upper(), 0)


def element_type(array: np.ndarray) -> int:
    return TensorProto.STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)


def size_in_bytes(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


class Names:
    """Gives names that are not used yet."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def fresh(self, wanted: str) -> str:
        name, count = wanted, 1
        while not name or name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


def names_in(graph: GraphProto) -> set[str]:
    """Every value name in a graph and its bodies."""
    found: set[str] = set()
    for part in graphs(graph):
        found |= {value.name for value in (*part.input, *part.output, *part.initializer)}
        found |= {name for node in part.node for name in (*node.input, *node.output)}
    return found - {""}


def schema_of(node: NodeProto, opset: int) -> onnx.defs.OpSchema | None:
    """The op's schema at this opset, or None for an op of another domain or an unknown one."""
    if node.domain not in ONNX:
        return None
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
