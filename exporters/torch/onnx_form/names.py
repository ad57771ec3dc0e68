"""The spec's names in an ONNX model: inputs, outputs and free dimensions."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir

from ....models.spec import ModelSpec
from ...onnx.output_names import output_names


def name_as(model: ir.Model, spec: ModelSpec) -> None:
    """Give inputs and outputs the spec's names and their free dimensions a symbol each."""
    graph = model.graph
    _make_outputs_differ(graph)
    outputs = output_names(spec)
    tensors = [*spec.inputs, *(replace(tensor, name=outputs[tensor.name]) for tensor in spec.outputs)]
    ends = list(zip([*graph.inputs, *graph.outputs], tensors, strict=True))
    _make_room(graph, {id(value): tensor.name for value, tensor in ends})
    symbols: dict[str, str] = {}
    for value, tensor in ends:
        value.name = tensor.name
        assert value.shape is not None
        for axis, (dim, found) in enumerate(zip(tensor.shape, value.shape, strict=True)):
            if dim.fixed:
                continue
            name = "batch" if spec.batched and axis == 0 else dim.name or f"{tensor.name}_{axis}"
            if isinstance(found, ir.SymbolicDim) and found.value is not None:
                symbols.setdefault(str(found.value), name)
            value.shape[axis] = name
    _rename(graph, symbols)


def _make_outputs_differ(graph: ir.Graph) -> None:
    """An output that is an input, a weight or another output becomes a value of its own: it has its own name."""
    taken = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for index, value in enumerate(graph.outputs):
        if id(value) in taken:
            node = ir.node("Identity", [value])
            own = node.outputs[0]
            own.name, own.type, own.shape = f"{value.name}__output_{index}", value.type, value.shape
            if value.shape is not None:
                own.shape = ir.Shape(list(value.shape))
            graph.append(node)
            graph.outputs[index] = own
        taken.add(id(graph.outputs[index]))


def _make_room(graph: ir.Graph, ends: Mapping[int, str]) -> None:
    """An inner value that has the name of an input or output gets another."""
    wanted = set(ends.values())
    for value in _values(graph):
        if value.name in wanted and id(value) not in ends:
            value.name = f"{value.name}__inner"


def _rename(graph: ir.Graph, symbols: Mapping[str, str]) -> None:
    """Free dimensions of inner values have the names that the inputs and outputs have for them."""
    for value in _values(graph):
        if value.shape is None or value.shape.is_static():
            continue
        value.shape = ir.Shape([_renamed(dim, symbols) for dim in value.shape])


def _renamed(dim: int | ir.SymbolicDim, symbols: Mapping[str, str]) -> int | str | ir.SymbolicDim:
    return symbols.get(str(dim.value), dim) if isinstance(dim, ir.SymbolicDim) else dim


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value, those of nested graphs included."""
    for one in (graph, *graph.subgraphs()):
        yield from one.inputs
        yield from one.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
