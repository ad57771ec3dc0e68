"""The part of a file's graph that model.toml asks for: outputs and inner values, under the names that it gives."""

from collections.abc import Mapping
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, shape_inference

from ....models.errors import BadFolder
from ....models.spec.spec import ModelSpec, TensorSpec
from .graph import names_in, read_by
from .large_files import weights_as_inputs

_CONSTANTS_ALONE = 4  # the first ir_version in which an initialiser need not be an input as well


def select(model: ModelProto, spec: ModelSpec, file_names: Mapping[str, str], path: Path) -> list[str]:
    """Make named inner values outputs, take out what no named output needs, and rename inputs and outputs, in place;
    gives what to tell.

    ``file_names``: a tensor's name in model.toml → its name in the file, where the two differ. An initialiser that is
    an input as well is no input. Raises BadFolder where a new name is that of another value of the graph.
    """
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    _keep(graph.input, {value.name for value in graph.input} - constants)
    if constants:
        model.ir_version = max(model.ir_version, _CONSTANTS_ALONE)
    wanted = {file_names.get(tensor.name, tensor.name): tensor for tensor in spec.outputs}
    given = [value.name for value in graph.output]
    notes = []
    if inner := _add_inner(model, wanted):
        notes.append(f"values inside of the graph are outputs, as model.toml asks: {', '.join(inner)}")
    if (
        wanted
        and (left := [name for name in given if name not in wanted])
        and wanted.keys() <= {*given, *inner}
    ):
        notes.append(f"outputs that model.toml does not name were taken out: {', '.join(left)}")
        _keep(graph.output, set(wanted))
        _drop_unread(graph, {file_names.get(tensor.name, tensor.name) for tensor in spec.inputs})
    taken = names_in(graph)
    for new, old in file_names.items():
        if new != old and new in taken:
            raise BadFolder(
                f"{path}: '{new}', the new name of '{old}', is that of another value of the graph"
            )
        _rename(graph, old, new)
    return notes


def _add_inner(model: ModelProto, wanted: Mapping[str, TensorSpec]) -> list[str]:
    """Add the wanted values that nodes of the main graph compute to the graph's outputs; returns the names added."""
    graph = model.graph
    given = {value.name for value in graph.output}
    inner = [name for node in graph.node for name in node.output if name in wanted and name not in given]
    known = _inferred(model) if inner else {}
    for name in inner:
        declared = helper.np_dtype_to_tensor_dtype(wanted[name].type.numpy)
        type_ = known.get(name) or declared
        graph.output.append(helper.make_tensor_value_info(name, type_, None))
    return inner


def _inferred(model: ModelProto) -> dict[str, int]:
    """The element type of each inner value, as far as ONNX's shape inference finds it. The inference takes models of at
    most 2 GiB, so large constants are passed to it as inputs."""
    found = shape_inference.infer_shapes(weights_as_inputs(model)).graph
    return {value.name: value.type.tensor_type.elem_type for value in found.value_info}


def _keep(values, names: set[str]) -> None:  # type: ignore[no-untyped-def]
    kept = [ValueInfoProto.FromString(value.SerializeToString()) for value in values if value.name in names]
    del values[:]
    values.extend(kept)


def _drop_unread(graph: GraphProto, inputs: set[str]) -> None:
    """Nodes, constants and inputs that no output needs; ``inputs`` stay."""
    needed = {value.name for value in graph.output}
    nodes: list[NodeProto] = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed |= read_by(node)
            nodes.append(NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(reversed(nodes))
    _keep(graph.input, needed | inputs)
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in needed:
            del graph.initializer[index]


def _rename(graph: GraphProto, old: str, new: str) -> None:
    """Rename an input or output by a node that passes the value on: inner values, those of bodies too, keep their
    names."""
    for value in graph.input:
        if value.name == old:
            value.name = new
            first = helper.make_node("Identity", [new], [old], name=f"{new}.named")
            rest = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
            del graph.node[:]
            graph.node.extend([first, *rest])
            return
    for value in graph.output:
        if value.name == old:
            value.name = new
            graph.node.append(helper.make_node("Identity", [old], [new], name=f"{new}.named"))
