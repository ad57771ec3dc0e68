"""Finds the inputs and outputs of an ONNX graph whose batch is not the first axis, such as the states of recurrent
layers: [layers, batch, hidden].

An axis is taken for the batch where it has the same symbolic name as the first axis of another input, or where the
tensor is connected to the state of a recurrent node. The conversion checks that a row gets the same answer in a batch
as alone.
"""

from collections.abc import Iterator, Mapping, Sequence

from onnx import GraphProto, NodeProto, ValueInfoProto

from ..onnx.reading.graph import ONNX, attribute, bodies, walk
from ..onnx.reading.signature import size_of

_STATES_IN = {"RNN": (5,), "GRU": (5,), "LSTM": (5, 6)}
_STATES_OUT = {"RNN": (1,), "GRU": (1,), "LSTM": (1, 2)}
# Operations between a graph's state tensor, which holds the states of all layers, and the state of one recurrent node:
# the tensor is divided along its first axis (the layers), and the new states are concatenated along it.
_CUTS = ("Slice", "Gather", "Split", "Squeeze", "Unsqueeze", "Concat", "Identity", "Cast")
STATE_AXIS = 1
STATE_RANK = 3


def batch_axes(
    graph: GraphProto, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> dict[str, tuple[int, str]]:
    """Tensor name → (axis of the batch, why), for the inputs and outputs whose batch is not the first axis."""
    found = _by_name(inputs, (*inputs, *outputs))
    for name, why in _states(graph):
        value = next((value for value in (*inputs, *outputs) if value.name == name), None)
        if value is not None and len(value.type.tensor_type.shape.dim) == STATE_RANK:
            found.setdefault(name, (STATE_AXIS, why))
    return found


def _by_name(
    inputs: Sequence[ValueInfoProto], values: Sequence[ValueInfoProto]
) -> dict[str, tuple[int, str]]:
    """The tensors whose first axis has a fixed size, and one of whose other axes has the same symbolic name as the
    first axis of an input: tensor name → (that axis, why)."""
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
    """(tensor name, why) of the graph inputs that a recurrent node reads as its state, and of the graph outputs that
    hold a state which a recurrent node gives."""
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
    """Whether a node is an ONNX RNN, GRU or LSTM whose states have the batch on axis 1. With the attribute ``layout`` 1
    the batch is axis 0."""
    return node.op_type in _STATES_IN and node.domain in ONNX and not attribute(node, "layout", 0)


def _origin(name: str, makers: Mapping[str, NodeProto]) -> str:
    """The value from which ``name`` was divided or concatenated, followed back through `_CUTS` and branches of If."""
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
