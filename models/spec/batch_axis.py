"""A batch on another axis than the first: recurrent states are [layers, batch, hidden].

Everything inside has the batch first: samples, batches, captured programs, what the gate compares. A tensor whose
``batch_axis`` is not 0 is moved where it enters or leaves: for a module in `capture/child.py`, for an ONNX graph in
`exporters/onnx/reading/batch_first.py`, for requests in `serve/http/codecs`.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


def batch_first(sizes: Sequence[Item], axis: int) -> tuple[Item, ...]:
    """Sizes (or anything else, one for each axis) in the model's order, with that of ``axis`` in front."""
    return (*sizes[axis : axis + 1], *sizes[:axis], *sizes[axis + 1 :])


def batch_back(sizes: Sequence[Item], axis: int) -> tuple[Item, ...]:
    """The inverse of `batch_first`."""
    return (*sizes[1 : axis + 1], *sizes[:1], *sizes[axis + 1 :])


def array_batch_first(array: np.ndarray, axis: int) -> np.ndarray:
    """C-contiguous; a view of the same memory where the batch is 1. ``axis`` 0: the array itself."""
    return np.ascontiguousarray(np.moveaxis(array, axis, 0)) if axis else array


def array_batch_back(array: np.ndarray, axis: int) -> np.ndarray:
    """A view, not contiguous in general. ``axis`` 0: the array itself."""
    return np.moveaxis(array, 0, axis) if axis else array
