"""Bounds within which the elements of an integer tensor must lie.

Two arrays of Python's integers (they do not wrap) with the tensor's dimensions, each of size 1 where the ends are the
same all along it. So one column of ids may belong to one table and the next column to another. For graphs of ATen
operations (`input_ranges.py`) and of ONNX (`exporters/onnx/reading/index_ranges.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import BadFolder
from ..spec.spec import ModelSpec, TensorSpec
from ..spec.value_range import ValueRange

_WIDEST = 4096  # places along an axis that may have ends of their own


@dataclass(frozen=True, slots=True)
class Bounds:
    """``low`` and ``high`` have one shape; ends are included."""

    low: np.ndarray
    high: np.ndarray

    @classmethod
    def uniform(cls, low: int, high: int, rank: int) -> "Bounds":
        shape = (1,) * max(rank, 1)  # of a single number too: numpy makes no arrays of its objects
        return cls(np.full(shape, low, object), np.full(shape, high, object))

    def holds(self, low: int, high: int) -> bool:
        """True if a tensor of values from ``low`` to ``high`` is within these bounds everywhere."""
        return bool((self.low <= low).all() and (self.high >= high).all())

    def clipped(self, low: int, high: int) -> "Bounds":
        return Bounds(np.maximum(self.low, low), np.minimum(self.high, high))

    def before_adding(self, number: int) -> "Bounds":
        return Bounds(self.low - number, self.high - number)

    def of_rank(self, rank: int) -> "Bounds | None":
        """Bounds of the same elements in a tensor of ``rank`` dimensions; None where ends differ by place."""
        return Bounds.uniform(self.low.item(), self.high.item(), rank) if self.low.size == 1 else None

    def along_new_axis(self, rank: int, axis: int) -> "Bounds":
        """Bounds for a tensor of ``rank`` dimensions, of which the tensor of these bounds is a place along ``axis``."""
        if self.low.ndim >= rank:  # of a single number
            return self
        return Bounds(np.expand_dims(self.low, axis), np.expand_dims(self.high, axis))

    def cut_out(
        self, axis: int, size: int, places: Sequence[int] | range, low: int, high: int
    ) -> "Bounds | None":
        """Bounds of ``x`` from these of ``x[..., places, ...]``, along an axis of ``size``: other elements may be any
        number from low to high.

        None where the axis is too long for ends of each place.
        """
        if size > _WIDEST:
            return None
        shape = list(self.low.shape)
        shape[axis] = size
        lows, highs = np.full(shape, low, object), np.full(shape, high, object)
        where: list[Any] = [slice(None)] * len(shape)
        where[axis] = list(places)
        lows[tuple(where)], highs[tuple(where)] = self.low, self.high
        return Bounds(lows, highs)

    def as_range(self, low: int, high: int) -> ValueRange | None:
        """The range as a spec says it, or None where it says nothing: every value of low..high is within, or none is.

        Ends that differ along another axis than the last become the widest of them.
        """
        inner = tuple(range(self.low.ndim - 1))
        lows, highs = self.low.min(axis=inner), self.high.max(axis=inner)
        pairs = [
            (max(least, low), min(most, high))
            for least, most in zip(np.ravel(lows), np.ravel(highs), strict=True)
        ]
        if any(least > most for least, most in pairs) or all(pair == (low, high) for pair in pairs):
            return None
        if len(set(pairs)) == 1:
            pairs = pairs[:1]
        return ValueRange(tuple(int(pair[0]) for pair in pairs), tuple(int(pair[1]) for pair in pairs))

    def admit(self, values: ValueRange) -> bool:
        """True if every value of a range is within these ends."""
        lows, highs = np.array(values.low, object), np.array(values.high, object)
        return bool((self.low <= lows).all() and (self.high >= highs).all())


def intersection(one: Bounds | None, other: Bounds) -> Bounds:
    return other if one is None else Bounds(np.maximum(one.low, other.low), np.minimum(one.high, other.high))


def spec_with(spec: ModelSpec, found: Iterable[Bounds | None]) -> ModelSpec:
    """The spec with the ranges derived for its inputs. Raises BadFolder where model.toml admits values that the model's
    tables do not have."""
    inputs = tuple(
        tensor if bounds is None else _ranged(spec, tensor, bounds)
        for tensor, bounds in zip(spec.inputs, found, strict=True)
    )
    return replace(spec, inputs=inputs)


def _ranged(spec: ModelSpec, tensor: TensorSpec, bounds: Bounds) -> TensorSpec:
    if tensor.datatype == "BOOL":
        return tensor
    info = np.iinfo(tensor.type.numpy)
    derived = bounds.as_range(int(info.min), int(info.max))
    if derived is None or tensor.range is None:
        return replace(tensor, range=derived or tensor.range)
    if not tensor.range.within(derived):
        raise BadFolder(
            f"input '{tensor.name}' of '{spec.name}': model.toml says range = {tensor.range}, but the tables that it "
            f"indexes have the rows {derived}; write that, or leave range out"
        )
    return tensor
