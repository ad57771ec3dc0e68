"""ScatterElements and ScatterND that add, as sums over a comparison of every index with every place.

Each line of the data has N places, and K updates with an index each go to it: place n gains the sum of the updates
whose index is n. Where [updates, K, N] are few elements that is a sum over K, exact for every number and datatype.
Where they are many it is a product of the updates with the comparison as zeros and ones [K, N], which all lines with
the same indices share: of floats alone, and an update that is not finite makes NaN of its whole line.
Source: the operators ScatterElements-18 and ScatterND-18 of the ONNX specification.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from .new_nodes import FLOATS, HALVES, NewNodes, wide

LARGEST = 1 << 26  # elements of one value, in the largest batch of a proof: 256 MiB in FP32
Sizes = Mapping[str, Sequence[int]]
_SUMMED = (*FLOATS, ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True, slots=True)
class _Lines:
    """``updates`` [...] of float or integer ``dtype`` and their ``indices``, int64 from 0 on, with size 1 on the
    ``shared`` axes, one at least, along which all lines have the same. ``axis``: of K, and of N in ``data``. ``sizes``:
    of the updates; ``places``: N."""

    data: ir.Value
    indices: ir.Value
    updates: ir.Value
    dtype: ir.DataType
    axis: int
    shared: Sequence[int]
    sizes: Sequence[int]
    places: int

    @property
    def summed(self) -> int:
        """Elements of [updates, N]."""
        return prod(self.sizes) * self.places

    @property
    def compared(self) -> int:
        """Elements of [indices, N]."""
        return self.places * prod(size for axis, size in enumerate(self.sizes) if axis not in self.shared)


def sum_of_elements(new: NewNodes, node: ir.Node, sizes: Sizes) -> ir.Value | str:
    """The value that takes the place of the output of a ScatterElements that adds, or the reason why there is none.

    ``sizes``: of each input, in the largest batch. A half is added up in FP32.
    """
    if reason := _reason_against(node, sizes):
        return reason
    data, indices, updates, dtype = _inputs(node)
    rank = len(_shape(data))
    axis = node.attributes.get_int("axis", 0) % rank
    places, given = sizes[_name(data)][axis], list(sizes[_name(updates)])
    narrow, shared = _before_expanding(new, indices, rank, axis)
    narrow = _from_the_start(new, new.cast(narrow, ir.DataType.INT64), _size(new, data, axis))
    wide_data, summands = new.cast(data, wide(dtype)), new.cast(updates, wide(dtype))
    if apart := not shared:  # a last axis of size 1 is one that all lines share
        narrow, summands = (new.op("Unsqueeze", value, new.integers(rank)) for value in (narrow, summands))
        shared, given = [rank], [*given, 1]
    sums = _sums(new, _Lines(wide_data, narrow, summands, dtype, axis, shared, given, places))
    if isinstance(sums, str):
        return sums
    if apart:
        sums = new.op("Squeeze", sums, new.integers(rank))
    if not _same_beside(data, updates, axis):
        sums = _padded(new, sums, data, rank)
    return _narrowed(new, new.op("Add", wide_data, sums), dtype)


def sum_of_slices(new: NewNodes, node: ir.Node, sizes: Sizes) -> ir.Value | str:
    """The value as `sum_of_elements` gives it, of a ScatterND that adds: one line of all places that an index tuple can
    name; the elements of a slice lie on the axis beside it."""
    if reason := _reason_against(node, sizes):
        return reason
    data, indices, updates, dtype = _inputs(node)
    found, (*before, depth) = sizes[_name(data)], sizes[_name(indices)]
    if not isinstance(_shape(indices)[-1], int) or depth == 0:
        return "how many axes its indices name is not a constant"
    flat = new.op("Flatten", new.cast(data, wide(dtype)), axis=depth)
    slices = new.op("Flatten", new.cast(updates, wide(dtype)), axis=len(before))
    numbers = _numbered(new, data, new.op("Flatten", indices, axis=len(before)), depth)
    given = [prod(before), prod(found[depth:])]
    sums = _sums(new, _Lines(flat, numbers, slices, dtype, 0, [1], given, prod(found[:depth])))
    if isinstance(sums, str):
        return sums
    added = new.op("Reshape", new.op("Add", flat, sums), new.op("Shape", data))
    return _narrowed(new, added, dtype)


def _sums(new: NewNodes, lines: _Lines) -> ir.Value | str:
    """The sum of the updates of each place: the shape of the updates, in which N places stand for the K updates. A
    reason where a comparison of the indices with all places is too large."""
    least = lines.compared if lines.dtype in FLOATS else lines.summed
    if least > LARGEST:
        return f"a comparison of its indices with all places would have {least} elements, more than {LARGEST}"
    rank, axis, last = len(lines.sizes), lines.axis, lines.shared[-1]
    outer = [*(each for each in range(rank) if each not in (axis, *lines.shared)), *lines.shared[:-1]]
    order = [*outer, last, axis]
    updates = new.op("Transpose", lines.updates, perm=order)
    indices = new.op("Transpose", lines.indices, perm=[*outer, axis, last])
    met = new.op("Equal", indices, _places(new, lines))  # [..., K, 1] and [N] give [..., K, N]
    if lines.summed <= LARGEST:
        nothing = new.constant(np.zeros((), wide(lines.dtype).numpy()))
        met = new.op("Unsqueeze", met, new.integers(rank - 2))
        updates = new.op("Unsqueeze", updates, new.integers(rank))
        sums = new.op("ReduceSum", new.op("Where", met, updates, nothing), new.integers(rank - 1), keepdims=0)
    else:
        sums = new.op("MatMul", updates, new.cast(met, wide(lines.dtype)))
    return new.op("Transpose", sums, perm=[order.index(each) for each in range(rank)])


def _places(new: NewNodes, lines: _Lines) -> ir.Value:
    """The numbers of all places, int64 [N]."""
    zero, one = (new.constant(np.array(number, np.int64)) for number in (0, 1))
    count = new.op("Squeeze", _size(new, lines.data, lines.axis), new.integers(0))
    return new.op("Range", zero, count, one)


def _size(new: NewNodes, value: ir.Value, axis: int) -> ir.Value:
    """The size of one axis of the value, int64 [1], computed when the file runs."""
    return new.op("Shape", value, start=axis, end=axis + 1)


def _from_the_start(new: NewNodes, indices: ir.Value, size: ir.Value) -> ir.Value:
    """The indices with ``size`` added to those below zero, which count from the end."""
    below = new.op("Less", indices, new.integers(0))
    return new.op("Where", below, new.op("Add", indices, size), indices)


def _numbered(new: NewNodes, data: ir.Value, tuples: ir.Value, depth: int) -> ir.Value:
    """The number of the place that each tuple of indices names, int64 [M, 1]: places are counted row by row."""
    tuples, number = new.cast(tuples, ir.DataType.INT64), None
    for axis in range(depth):
        size = _size(new, data, axis)
        one = new.op("Slice", tuples, new.integers(axis), new.integers(axis + 1), new.integers(1))
        one = _from_the_start(new, one, size)
        number = one if number is None else new.op("Add", new.op("Mul", number, size), one)
    assert number is not None
    return number


def _before_expanding(new: NewNodes, indices: ir.Value, rank: int, axis: int) -> tuple[ir.Value, list[int]]:
    """The indices with size 1 on the axes along which an Expand repeats them, and these axes."""
    maker = indices.producer()
    before = maker.inputs[0] if maker is not None and maker.op_type == "Expand" else None
    if before is None or before.shape is None:
        return indices, []
    missing = rank - len(before.shape)
    shape = [*[1] * missing, *before.shape]
    shared = [each for each, size in enumerate(shape) if size == 1 and each != axis]
    if not shared or not _same(shape[axis], _shape(indices)[axis]):
        return indices, []
    return new.op("Unsqueeze", before, new.integers(*range(missing))) if missing else before, shared


def _padded(new: NewNodes, sums: ir.Value, data: ir.Value, rank: int) -> ir.Value:
    """Zeros behind the sums, up to the sizes of the data: updates may be fewer on the other axes."""
    missing = new.op("Sub", new.op("Shape", data), new.op("Shape", sums))
    return new.op("Pad", sums, new.op("Concat", new.integers(*[0] * rank), missing, axis=0))


def _same_beside(data: ir.Value, updates: ir.Value, axis: int) -> bool:
    """True if the inputs ``data`` and ``updates`` of a Scatter node are known to have equal sizes on all axes except
    ``axis``."""
    pairs = enumerate(zip(_shape(data), _shape(updates), strict=True))
    return all(each == axis or _same(one, other) for each, (one, other) in pairs)


def _same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    return (isinstance(one, int) or one.value is not None) and one == other


def _reason_against(node: ir.Node, sizes: Sizes) -> str:
    values = [value for value in node.inputs if value is not None]
    if any(value.shape is None or value.name not in sizes for value in values):
        return "the sizes of its inputs are not known"
    return "" if values[0].dtype in _SUMMED else f"numbers of type {values[0].dtype} are not added up here"


def _inputs(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, ir.DataType]:
    """Data, indices and updates, and the datatype of data and updates."""
    data, indices, updates = node.inputs
    assert data is not None and indices is not None and updates is not None and data.dtype is not None
    return data, indices, updates, data.dtype


def _shape(value: ir.Value) -> ir.Shape:
    assert value.shape is not None
    return value.shape


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def _narrowed(new: NewNodes, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return new.cast(value, dtype) if dtype in HALVES else value
