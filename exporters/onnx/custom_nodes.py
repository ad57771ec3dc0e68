"""A file with nodes that ONNX Runtime does not know (plugins of another engine): cut at them, and joined again.

What such a custom node gives becomes an input of the cut file, and what it reads an output. The half of a cut file
takes and gives FP32 at these places, as at its other ends, so the custom nodes read and give FP32 in the joined half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper
from onnxruntime.capi import _pybind_state

from ...models.errors import BadFolder, ExportFailed
from .reading.graph import ONNX, Names, bodies, names_in, read_by, replace_all, walk


@dataclass(frozen=True, slots=True)
class Parts:
    """The nodes of a main graph: ``custom`` ones, and ``others``. ``constants``: what holds a constant, by its name."""

    custom: Sequence[NodeProto]
    others: Sequence[NodeProto]
    constants: Mapping[str, NodeProto | TensorProto]

    @property
    def made(self) -> list[str]:
        """The names of the values that the custom nodes give."""
        return [name for node in self.custom for name in node.output if name]

    @property
    def recorded(self) -> list[str]:
        """The values that the custom nodes give and others read."""
        read = set[str]().union(*map(read_by, self.others))
        return [name for name in self.made if name in read]

    @property
    def read(self) -> list[str]:
        """The values that the custom nodes read and others compute."""
        computed = {name for node in self.others for name in node.output} - self.constants.keys()
        return list(dict.fromkeys(name for node in self.custom for name in node.input if name in computed))


def parted(model: ModelProto) -> Parts:
    """Raises BadFolder where a custom node is in a body or has one."""
    known = _known() | {(function.domain, function.name) for function in model.functions}

    def is_custom(node: NodeProto) -> bool:
        return ("" if node.domain in ONNX else node.domain, node.op_type) not in known

    custom = [node for node in model.graph.node if is_custom(node)]
    if len(inside := [node for node in walk(model.graph) if is_custom(node)]) > len(custom) or any(
        map(bodies, custom)
    ):
        raise BadFolder(
            f"ONNX Runtime does not know {called(inside[0])}, which is in the body of a node or has one: expected "
            "custom nodes in the main graph, without a body"
        )
    others = [node for node in model.graph.node if not is_custom(node)]
    constants = {node.output[0]: node for node in others if node.op_type == "Constant"}
    return Parts(custom, others, constants | {tensor.name: tensor for tensor in model.graph.initializer})


@cache
def _known() -> frozenset[tuple[str, str]]:
    library: Any = _pybind_state
    return frozenset((schema.domain, schema.name) for schema in library.get_all_operator_schema())


def called(node: NodeProto) -> str:
    operation = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{operation} '{node.name or node.output[0]}'"


def fingerprints(model: ModelProto) -> list[bytes]:
    """The content of each custom node but its name: operation, attributes, the values that it reads and gives, and the
    constants among them."""
    parts, found = parted(model), list[bytes]()
    for node in parts.custom:
        bare = NodeProto.FromString(node.SerializeToString())
        held = [
            (place, parts.constants[name]) for place, name in enumerate(node.input) if name in parts.constants
        ]
        for place, _ in held:
            bare.input[place] = ""
        bare.name, bare.doc_string = "", ""
        attributes = sorted(each.SerializeToString(deterministic=True) for each in bare.attribute)
        del bare.attribute[:]
        constants = [b"%d:%s" % (place, _content(constant)) for place, constant in held]
        found.append(b"|".join([bare.SerializeToString(deterministic=True), *attributes, *constants]))
    return sorted(found)


def _content(constant: NodeProto | TensorProto) -> bytes:
    """The numbers of a constant, however they are stored."""
    tensor = constant if isinstance(constant, TensorProto) else constant.attribute[0].t
    array = numpy_helper.to_array(tensor)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def cut(model: ModelProto, given: Mapping[str, ValueInfoProto]) -> None:
    """Take the custom nodes out, in place. ``given``: the types of `Parts.recorded`, where the file does not state
    them. Raises BadFolder where a type is not known."""
    graph, parts = model.graph, parted(model)
    declared = {value.name: value for value in (*graph.value_info, *graph.output)} | dict(given)
    if lacking := [name for name in parts.recorded if name not in declared]:
        raise BadFolder(
            f"the file does not state the type of '{lacking[0]}', which {called(parts.custom[0])} gives"
        )
    made = set(parts.made)
    outputs = {value.name: value for value in graph.output if value.name not in made}
    outputs = {name: declared.get(name, ValueInfoProto(name=name)) for name in (*outputs, *parts.read)}
    inputs = [declared[name] for name in parts.recorded]
    inner = [value for value in graph.value_info if value.name not in made | outputs.keys()]
    domains = {*ONNX, *(node.domain for node in walk(graph))} - {node.domain for node in parts.custom}
    domains |= {*ONNX, *(node.domain for node in parts.others), *(each.domain for each in model.functions)}
    replace_all(model.opset_import, [each for each in model.opset_import if each.domain in domains])
    graph.input.extend(inputs)
    for field, values in (
        (graph.node, parts.others),
        (graph.output, outputs.values()),
        (graph.value_info, inner),
    ):
        replace_all(field, values)


def join(half: ModelProto, whole: ModelProto) -> None:
    """Put the custom nodes of ``whole`` into ``half``, in place: the half of what `cut` made of ``whole``. The types
    at their borders stay stated, so that it can be cut again. Raises ExportFailed where a name is taken."""
    graph, parts = half.graph, parted(whole)
    recorded, made, taken = set(parts.recorded), set(parts.made), names_in(half.graph)
    if clash := sorted((made - recorded) & taken):
        raise ExportFailed(f"the half has a value '{clash[0]}', as a custom node has: rename it in the model")
    nodes, names, renamed = list(graph.node), Names(taken | made), dict[str, str]()
    for node in parts.custom:
        copy = NodeProto.FromString(node.SerializeToString())
        own = [name for name in dict.fromkeys(node.input) if name in parts.constants and name not in renamed]
        for name in own:
            # The node gets a constant of its own: the half may hold this one in half.
            constant, renamed[name] = parts.constants[name], names.fresh(name)
            if isinstance(constant, TensorProto):
                graph.initializer.add().CopyFrom(constant)
                graph.initializer[-1].name = renamed[name]
            else:
                nodes.append(NodeProto.FromString(constant.SerializeToString()))
                nodes[-1].output[0] = renamed[name]
        copy.input[:] = [renamed.get(name, name) for name in node.input]
        nodes.append(copy)
    ends = {value.name: value for value in (*whole.graph.output, *graph.output)}
    outputs = [ends[value.name] for value in whole.graph.output if value.name in taken | made]
    kept = {value.name for value in outputs}
    edges = [value for value in graph.input if value.name in recorded]
    edges = [value for value in (*edges, *graph.output) if value.name not in kept]
    own = {value.name: value for value in graph.input}
    asked = own.keys() | {name for node in parts.custom for name in node.input} - parts.constants.keys()
    inputs = [own.get(value.name, value) for value in whole.graph.input if value.name in asked]
    domains = {node.domain for node in parts.custom} - {each.domain for each in half.opset_import} - {*ONNX}
    half.opset_import.extend(each for each in whole.opset_import if each.domain in domains)
    for field, values in (
        (graph.node, _in_order(nodes)),
        (graph.input, inputs),
        (graph.output, outputs),
        (graph.value_info, [*graph.value_info, *edges]),
    ):
        replace_all(field, values)


def _in_order(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes, each behind those that it reads."""
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    reads = {
        place: {makers[name] for name in read_by(node) if name in makers} for place, node in enumerate(nodes)
    }
    return [nodes[place] for place in TopologicalSorter(reads).static_order()]
