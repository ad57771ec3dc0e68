"""Finds the inputs and outputs of an ONNX graph whose batch is not the first axis, such as the states of recurrent
layers: [layers, batch, hidden].

An axis is taken for the batch where it has the same symbolic name as the first axis of another input, or where the
tensor is connected to the state of a recurrent node. Trial runs of the file then decide whether it is batched: each
output has one row for each sample, and a sample's answer does not depend on the others.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, ValueInfoProto

from ...models.capture.agreement import axis_of_rows
from ...models.spec.batch_axis import batch_first
from ..onnx.reading.graph import ONNX, attribute, bodies, walk
from ..onnx.reading.signature import size_of
from ..question import SAME_AMONG_OTHERS_IN_HALF, largest_of, same_among_others
from .trial_sizes import Run, Tried

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
    """True if a node is an ONNX RNN, GRU or LSTM whose states have the batch on axis 1. With the attribute ``layout`` 1
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


def batch_of(
    value: ValueInfoProto, array: np.ndarray, rows: int, axes: Mapping[str, int] | None
) -> int | None:
    """The axis of an output that has a place for each row: the first where it can be; None where none has, or more."""
    if axes is None:
        return None
    known = [axes[value.name]] if value.name in axes else [0]
    fitting = [axis for axis in known if axis < array.ndim and array.shape[axis] == rows]
    if not fitting and axes and rows > 1:
        fitting = [axis for axis in range(array.ndim) if array.shape[axis] == rows]
    return fitting[0] if len(fitting) == 1 else None


def paired(tried: Tried, places: Sequence[int | None]) -> bool:
    """True if an output of the ONNX file holds one number for each pair of samples of the batch, as x·xᵀ does.

    Such an output has, besides its batch axis, a second axis that grows with the number of samples. ``places``: the
    batch axis of each output.

    The file is also run with one row more: a size that depends on values may grow by chance in one of the runs.
    """
    alone = tried.of_rows(1) if tried.rows > 1 else None
    if alone is None or not _grow_twice(alone, tried.outputs, places):
        return False
    more = tried.of_rows(tried.rows + 1)
    return more is not None and _grow_twice(alone, more, places)


def _grow_twice(
    alone: Sequence[np.ndarray], joint: Sequence[np.ndarray], places: Sequence[int | None]
) -> bool:
    return any(
        axis_of_rows([batch_first(one.shape, place or 0)], batch_first(many.shape, place or 0)) is not None
        for one, many, place in zip(alone, joint, places, strict=True)
    )


def are_independent(graph: GraphProto, tried: Tried, places: Sequence[int | None], run: Run) -> bool:
    """True if the ONNX file gives each sample of a successful trial run the same answer when it is run alone. A network
    over graphs, whose first axis counts the nodes of one graph, does not.

    ``places``: the batch axis of each output. True without a run for a file with DynamicQuantizeLinear: its scale is
    taken over the whole batch, so that answers differ although the rows are samples.
    """
    if tried.rows < 2 or any(node.op_type == "DynamicQuantizeLinear" for node in graph.node):
        return True
    for row in range(tried.rows):
        try:
            alone = run({name: array[row : row + 1] for name, array in tried.inputs.items()})
        except Exception:  # ONNX Runtime has no narrower one
            return False
        for one, many, place in zip(alone, tried.outputs, places, strict=True):
            if one.ndim == many.ndim and not _is_same(one.take(0, place), many.take(row, place)):
                return False
    return True


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Integers, and sizes that values decide, are not compared: a near tie may choose another one."""
    if one.shape != other.shape or one.dtype.kind != "f":
        return True
    return same_among_others(one, other, largest_of(other), SAME_AMONG_OTHERS_IN_HALF)
