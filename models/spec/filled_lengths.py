"""Rows of different lengths in one batch: an axis that a mask covers is filled up to one of a few sizes.

An axis may be filled up where a mask has it, or where an input of lengths is of it. The mask is 0 there, every other
input repeats its last place, so that all values stay valid. That this changes no answer is proven by a conversion
(`exporters/proof/neutral_lengths.py`); a stored spec has ``[batching] lengths`` only where it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .said_by_name import is_mask
from .spec import Dim, ModelSpec, TensorSpec
from .value_range import ValueRange

Shapes = tuple[tuple[int, ...], ...]  # of the inputs, without the batch axis


@dataclass(frozen=True, slots=True)
class Lengths:
    """``axes``: name of each axis that may be filled up → its bounds and the sizes that it is filled up to.
    ``inputs``, ``outputs``: of each tensor in the spec's order the names of its axes without the batch, "" for one that
    stays as it is. ``masks``: whether that input is a mask."""

    axes: dict[str, tuple[Dim, tuple[int, ...]]]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    masks: tuple[bool, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> "Lengths | None":
        """None where lengths are never filled up: nothing is asked for, or no named axis has a mask."""
        asked = spec.batching.lengths
        if not asked or not spec.batched:
            return None
        covered = {tensor.lengths_of for tensor in spec.inputs}
        covered |= {dim.name or "" for tensor in spec.inputs if is_mask(tensor) for dim in tensor.shape[1:]}
        dims = {dim.name: dim for tensor in spec.inputs for dim in tensor.shape[1:] if not dim.fixed}
        axes = {name: (dim, _sizes(dim, asked)) for name, dim in dims.items() if name and name in covered}
        if not axes:
            return None

        def named(tensors: Sequence[TensorSpec]) -> tuple[tuple[str, ...], ...]:
            return tuple(
                tuple(dim.name if dim.name in axes else "" for dim in tensor.shape[1:]) for tensor in tensors
            )

        return cls(axes, named(spec.inputs), named(spec.outputs), tuple(map(is_mask, spec.inputs)))

    def shared(self, shapes: Shapes) -> Shapes:
        """The shapes that the inputs have once they are filled up: requests that have these in common share a batch."""
        return tuple(
            tuple(self.size(name, size) if name else size for name, size in zip(names, shape, strict=True))
            for names, shape in zip(self.inputs, shapes, strict=True)
        )

    def filled(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The inputs of one request, in the spec's order, filled up."""
        return [
            self._fill(array, names, mask)
            for array, names, mask in zip(arrays, self.inputs, self.masks, strict=True)
        ]

    def cut(self, outputs: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs of rows that were filled up, cut to the sizes that their inputs ``arrays`` had before."""
        sizes = {
            name: size
            for names, array in zip(self.inputs, arrays, strict=True)
            for name, size in zip(names, array.shape[1:], strict=True)
        }
        return [
            np.ascontiguousarray(
                output[(slice(None), *(slice(sizes[name]) if name else slice(None) for name in names))]
            )
            for output, names in zip(outputs, self.outputs, strict=True)
        ]

    def size(self, name: str, size: int) -> int:
        """The size that an axis of this name and size is filled up to; its own where it is longer than all of them, or
        empty: it has no last place to repeat."""
        return next((most for most in self.axes[name][1] if 0 < size <= most), size)

    def _fill(self, array: np.ndarray, names: Sequence[str], is_mask: bool) -> np.ndarray:
        for axis, name in enumerate(names, 1):
            size = array.shape[axis]
            if not name or (most := self.size(name, size)) == size:
                continue
            filled = np.empty((*array.shape[:axis], most, *array.shape[axis + 1 :]), array.dtype)
            before = (slice(None),) * axis
            filled[(*before, slice(size))] = array
            filled[(*before, slice(size, None))] = 0 if is_mask else array[(*before, slice(size - 1, size))]
            array = filled
        return array


def _sizes(dim: Dim, asked: Sequence[int]) -> tuple[int, ...]:
    """The sizes asked for within the axis' bounds, and its end."""
    if dim.maximum is None:
        return tuple(size for size in asked if size >= dim.minimum)
    return (*(size for size in asked if dim.minimum <= size < dim.maximum), dim.maximum)


def settled(inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The inputs, with the range 1 to n in the place of ``lengths_of`` where that axis has the fixed size n."""
    fixed = {dim.name: dim.minimum for tensor in inputs for dim in tensor.shape if dim.name and dim.fixed}
    return tuple(
        replace(tensor, lengths_of="", range=ValueRange((1,), (fixed[tensor.lengths_of],)))
        if tensor.lengths_of in fixed
        else tensor
        for tensor in inputs
    )
