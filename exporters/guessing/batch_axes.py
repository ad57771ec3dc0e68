"""Inputs and outputs of an ONNX graph whose batch is not the first axis: states of recurrent layers are [layers, batch,
hidden].

Two signs count: a size with the name of the first axis of another input, and a way through the graph to the state of a
recurrent node. Whether rows are then answered as they are alone is asked at conversion.
"""

from collections.abc import Iterator, Mapping, Sequence

from onnx import GraphProto, NodeProto, ValueInfoProto

from ..foreign.graph import ONNX, attribute, bodies, walk
from ..foreign.signature import size_of

_STATES_IN = {"RNN": (5,), "GRU": (5,), "LSTM": (5, 6)}
_STATES_OUT = {"RNN": (1,), "GRU": (1,), "LSTM": (1, 2)}
# What layers do to the states of all layers: they are cut along the first axis, and joined again.
_CUTS = ("Slice", "Gather", "Split", "Squeeze", "Unsqueeze", "Concat", "Identity", "Cast")
STATE_AXIS = 1
STATE_RANK = 3


def batch_axes(
    graph: GraphProto, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> dict[str, tuple[int, str]]:
    """Name → (axis, why), of those whose batch is not the first axis."""
    found = _by_name(inputs, (*inputs, *outputs))
    for name, why in _states(graph):
        value = next((value for value in (*inputs, *outputs) if value.name == name), None)
        if value is not None and len(value.type.tensor_type.shape.dim) == STATE_RANK:
            found.setdefault(name, (STATE_AXIS, why))
    return found


def _by_name(
    inputs: Sequence[ValueInfoProto], values: Sequence[ValueInfoProto]
) -> dict[str, tuple[int, str]]:
    """Those with a fixed first axis and one other axis that is named as the first axis of an input."""
    batch = {dims[0].dim_param: value.name for value in inputs if (dims := value.type.tensor_type.shape.dim)}
    batch.pop("", None)
    found = {}
    for value in values:
        dims = value.type.tensor_type.shape.dim
        axes = [axis for axis, dim in enumerate(dims) if dim.dim_param in batch]
        if len(axes) == 1 and axes[0] and size_of(value, 0) is not None:
            name = dims[axes[0]].dim_param
            found[value.name] = (axes[0], f"it is '{name}', as the first axis of '{batch[name]}'")
    return found


def _states(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Inputs that a recurrent node has as its state, and outputs that it gives as its state, each with why."""
    nodes = list(walk(graph))
    makers = {output: node for node in nodes for output in node.output}
    for node in nodes:
        if _is_recurrent(node):
            why = f"a state of the {node.op_type} '{node.name or node.output[0]}'"
            yield from ((_origin(node.input[place], makers), why) for place in _STATES_IN[node.op_type]
                        if place < len(node.input))  # fmt: skip
    for value in graph.output:
        name = _origin(value.name, makers)
        node = makers.get(name)
        if (
            node is not None
            and _is_recurrent(node)
            and list(node.output).index(name) in _STATES_OUT[node.op_type]
        ):
            yield value.name, f"a state of the {node.op_type} '{node.name or node.output[0]}'"


def _is_recurrent(node: NodeProto) -> bool:
    """With the batch on axis 1 of its states: layout 1 has it first."""
    return node.op_type in _STATES_IN and node.domain in ONNX and not attribute(node, "layout", 0)


def _origin(name: str, makers: Mapping[str, NodeProto]) -> str:
    """The value that ``name`` is cut out of or joined from."""
    seen: set[str] = set()
    while name in makers and name not in seen:
        seen.add(name)
        node = makers[name]
        if node.op_type == "If" and bodies(node):
            branch = next(iter(bodies(node).values()))
            name = branch.output[list(node.output).index(name)].name
        elif node.op_type in _CUTS and node.input:
            name = node.input[0]
        else:
            break
    return name
