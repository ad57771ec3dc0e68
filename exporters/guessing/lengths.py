"""Finds the inputs of an ONNX file that are lengths, and the axis of those lengths, which no ONNX file states."""

import re
from collections.abc import Sequence

from onnx import GraphProto

from ...models.spec.spec import TensorSpec
from ..onnx.reading.graph import walk

_SAME_VALUES = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_RECURRENT = ("GRU", "LSTM", "RNN")
_LENGTHS = 4  # the place of a recurrent operator's input "sequence_lens"
_NAME = re.compile(r"(^|[^a-z])(len|lens|length|lengths)([^a-z]|$)")


def lengths_in(graph: GraphProto, inputs: Sequence[TensorSpec]) -> dict[str, tuple[str, str]]:
    """The name of the axis, and why, by the name of each input that has lengths.

    Lengths are integers of one axis, which a recurrent operator takes for them or whose name says so. They are of the
    one named axis of the other inputs; of several, of that of the input whose name theirs begins with.
    """
    counted, found = _counted(graph), dict[str, tuple[str, str]]()
    for tensor in inputs:
        why = _reason(tensor, counted)
        if why and (axis := _axis_for(tensor, inputs)):
            found[tensor.name] = axis, why
    return found


def _reason(tensor: TensorSpec, counted: set[str]) -> str:
    if tensor.datatype not in ("INT32", "INT64") or len(tensor.shape) != 1 or tensor.range is not None:
        return ""
    if tensor.name in counted:
        return "a recurrent layer takes it for the lengths of its rows"
    return "its name says that it has lengths" if _NAME.search(tensor.name.lower()) else ""


def _axis_for(lengths: TensorSpec, inputs: Sequence[TensorSpec]) -> str | None:
    own = {dim.name for dim in lengths.shape}
    names = {
        tensor.name: [
            dim.name for dim in tensor.shape[1:] if dim.name and dim.name not in own and not dim.fixed
        ]
        for tensor in inputs
        if tensor is not lengths
    }
    all_names = {axis for axes in names.values() for axis in axes}
    if len(all_names) > 1:
        all_names = {axis for name, axes in names.items() if lengths.name.startswith(name) for axis in axes}
    return all_names.pop() if len(all_names) == 1 else None


def _counted(graph: GraphProto) -> set[str]:
    """The values that recurrent operators take for lengths, and those that have the same numbers before them."""
    makers = {output: node for node in graph.node for output in node.output}
    found = set[str]()
    for node in walk(graph):
        if node.op_type not in _RECURRENT or len(node.input) <= _LENGTHS:
            continue
        name = node.input[_LENGTHS]
        found.add(name)
        while name in makers and makers[name].op_type in _SAME_VALUES:
            name = makers[name].input[0]
            found.add(name)
    return found
