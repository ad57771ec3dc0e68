"""A discrete Fourier transform (ONNX DFT) as one product with a constant matrix.

A line of N numbers along the axis, real or complex, is a row of N · C numbers. The transform is linear in them, so it
is a product with a matrix [N · C, K · P] of cosines and sines: K numbers come out, of P parts (1 real, 2 complex). The
matrix is computed in FP64. Source: the operators DFT-17 and DFT-20 of the ONNX specification.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from .new_nodes import FLOATS, HALVES, NewNodes, wide

LARGEST_MATRIX = 1 << 24  # elements: 64 MiB in FP32


def fourier_product(new: NewNodes, node: ir.Node, opset: int) -> ir.Value | str:
    """The value that takes the place of the DFT's output, or the reason why there is none.

    It has the datatype of the input; the product of a half input is computed in FP32.
    """
    x = node.inputs[0]
    assert x is not None
    shape, dtype = x.shape, x.dtype
    if shape is None or dtype is None or dtype not in FLOATS:
        return "the shape and type of its input are not known"
    rank, parts, axis, length = len(shape), shape[-1], _axis(node, opset), _integer(node, 1, 0)
    if axis is None or (parts != 1 and parts != 2):
        return "its axis, or whether its input is real or complex, is not a constant"
    axis %= rank
    inverse, onesided = (node.attributes.get_int(name, 0) == 1 for name in ("inverse", "onesided"))
    found = shape[axis]
    if not isinstance(found, int) or not isinstance(parts, int) or length is None:
        return "its length is not a constant"
    if onesided and parts != (2 if inverse else 1):
        return "a onesided transform takes real numbers forward and complex ones back"
    length = length or (2 * (found - 1) if inverse and onesided else found)
    if inverse and onesided and found != length // 2 + 1:
        # ONNX's reference implementation cuts or fills up the spectrum, ONNX Runtime 1.31 answers otherwise
        return f"its spectrum has {found} numbers, where a length of {length} has {length // 2 + 1}"
    read = min(found, length)
    if (size := read * parts * length * 2) > LARGEST_MATRIX:
        return f"its matrix would have up to {size} elements, more than {LARGEST_MATRIX}"
    if read < found:
        x = new.op("Slice", x, new.integers(0), new.integers(read), new.integers(axis))
    matrix = fourier_matrix(length, read, parts, inverse, onesided).astype(wide(dtype).numpy())
    came = _along(new, new.cast(x, wide(dtype)), rank, axis, matrix)
    return new.cast(came, dtype) if dtype in HALVES else came


def fourier_matrix(length: int, read: int, parts: int, inverse: bool, onesided: bool) -> np.ndarray:
    """FP64 [read, parts, K, P]: what the number at each place read adds to each number that comes out.

    Numbers beyond ``read`` are zero. Inverse and onesided: the numbers read are the first half of a spectrum, whose
    second half is their conjugate, and what comes out is real.
    """
    count = length if inverse or not onesided else length // 2 + 1
    places = np.outer(np.arange(read), np.arange(count)) % length
    angle = (1 if inverse else -1) * 2.0 * np.pi * places / length
    quarters = places * 4 % length == 0  # there both are 0, 1 or −1, which FP64 misses by its rounding of π
    cos, sin = (np.where(quarters, np.round(exact), exact) for exact in (np.cos(angle), np.sin(angle)))
    matrix = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], 1)[:, :parts]
    if inverse:
        matrix /= length
    if inverse and onesided:
        own = np.arange(read) * 2 % length == 0  # their conjugate is themselves
        matrix = matrix[..., :1] * np.where(own, 1.0, 2.0)[:, None, None, None]
    return matrix


def _along(new: NewNodes, x: ir.Value, rank: int, axis: int, matrix: np.ndarray) -> ir.Value:
    """The product of the lines along ``axis`` of x [..., N, ..., C] with the matrix [N, C, K, P]: [..., K, ..., P]."""
    read, parts, count, made = matrix.shape
    order = [*(place for place in range(rank - 1) if place != axis), axis, rank - 1]
    kept = [0] * (rank - 2)  # a size of 0 keeps the input's
    rows = new.op("Reshape", new.op("Transpose", x, perm=order), new.integers(*kept, read * parts))
    flat = new.constant(np.ascontiguousarray(matrix.reshape(read * parts, count * made)))
    lines = new.op("Reshape", new.op("MatMul", rows, flat), new.integers(*kept, count, made))
    return new.op("Transpose", lines, perm=[order.index(place) for place in range(rank)])


def _axis(node: ir.Node, opset: int) -> int | None:
    """The axis of a DFT; None where the graph computes it. Below opset 20 it is an attribute, 1 unless given."""
    if opset < 20:
        return node.attributes.get_int("axis", 1)
    return _integer(node, 2, -2)


def _integer(node: ir.Node, slot: int, default: int) -> int | None:
    """The number in the node's input at ``slot``; ``default`` where there is no such input, None where the graph
    computes it."""
    value = node.inputs[slot] if len(node.inputs) > slot else None
    if value is None:
        return default
    constant = get_const_tensor(value)
    return None if constant is None else int(constant.numpy().reshape(-1)[0])
