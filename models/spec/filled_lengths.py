"""Rows of different lengths in one batch: an axis that a mask covers is filled up to the longest row, or to one of a
few sizes.

An axis may be filled up where a mask has it, or where an input of lengths is of it. The mask is 0 there, every other
input repeats its last place, so that all values stay valid. That this changes no answer is proven by a conversion
(`exporters/proof/neutral_lengths.py`); a stored spec has ``[batching] lengths`` only where it is.
"""

from bisect import bisect_left
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
        sizes = {name: _sizes(dim, asked) for name, dim in dims.items() if name and name in covered}
        axes = {name: (dims[name], several) for name, several in sizes.items() if several}
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

    @property
    def to_the_longest(self) -> "Lengths":
        """These axes with a single size each, their largest: every row is filled up to it."""
        return replace(self, axes={name: (dim, sizes[-1:]) for name, (dim, sizes) in self.axes.items()})

    def kind(self, shapes: Shapes) -> tuple[Shapes, tuple[int, ...]]:
        """The shapes that rows must have in common to share a batch, with -1 at each axis that may be filled up; and
        the sizes of these axes, one for each name."""
        sizes = dict[str, int]()
        rest = list[tuple[int, ...]]()
        for names, shape in zip(self.inputs, shapes, strict=True):
            at = [
                name and 0 < size <= self.axes[name][1][-1] for name, size in zip(names, shape, strict=True)
            ]
            rest.append(tuple(-1 if free else size for free, size in zip(at, shape, strict=True)))
            sizes |= {name: size for free, name, size in zip(at, names, shape, strict=True) if free}
        return tuple(rest), tuple(sizes.values())

    def filled(self, arrays: Sequence[np.ndarray], shapes: Shapes) -> list[np.ndarray]:
        """The inputs of one request, in the spec's order, filled up to ``shapes``."""
        return [
            self._fill(array, shape, mask)
            for array, shape, mask in zip(arrays, shapes, self.masks, strict=True)
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
        sizes = self.axes[name][1]
        return sizes[bisect_left(sizes, size)] if 0 < size <= sizes[-1] else size

    def _fill(self, array: np.ndarray, shape: Sequence[int], is_mask: bool) -> np.ndarray:
        for axis, most in enumerate(shape, 1):
            if (size := array.shape[axis]) == most:
                continue
            filled = np.empty((*array.shape[:axis], most, *array.shape[axis + 1 :]), array.dtype)
            before = (slice(None),) * axis
            filled[(*before, slice(size))] = array
            filled[(*before, slice(size, None))] = 0 if is_mask else array[(*before, slice(size - 1, size))]
            array = filled
        return array


def longest_of(several: Sequence[Shapes]) -> Shapes:
    """The shapes of a batch that all these rows fit into: for each axis the largest size that a row has there."""
    return tuple(
        tuple(max(sizes) for sizes in zip(*same, strict=True)) for same in zip(*several, strict=True)
    )


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
