"""Decides from trial runs of an ONNX file whether it is batched: each output has one row for each sample of the batch,
and a sample's answer does not depend on the other samples."""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import GraphProto, ValueInfoProto

from ...models.batch_axis import batch_first
from ...models.capture.agreement import axis_of_rows
from ..question import SAME_AMONG_OTHERS_IN_HALF, largest_of, same_among_others
from .trial_sizes import Run, Tried


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
    """Whether an output of the ONNX file holds one number for each pair of samples of the batch, as x·xᵀ does.

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
    """Whether the ONNX file gives each sample of a successful trial run the same answer when it is run alone. A network
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
