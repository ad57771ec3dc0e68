"""Bounds within which the elements of an integer tensor must lie, and the inverse of operations on such bounds.

Two arrays of Python's integers (they do not wrap) with the tensor's dimensions, each of size 1 where the ends are the
same all along it. So one column of ids may belong to one table and the next column to another. For graphs of ATen
operations (`index_ranges/needs.py`) and of ONNX (`exporters/onnx/reading/index_ranges.py`).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..value_range import ValueRange

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

    @property
    def is_uniform(self) -> bool:
        return self.low.size == 1

    def holds(self, low: int, high: int) -> bool:
        """Whether a tensor of values from ``low`` to ``high`` is within them everywhere."""
        return bool((self.low <= low).all() and (self.high >= high).all())

    def around(self, other: "Bounds") -> bool:
        """Whether these ends, which must be uniform, are the other's or wider."""
        return bool((other.low >= self.low.item()).all() and (other.high <= self.high.item()).all())

    def clipped(self, low: int, high: int) -> "Bounds":
        return Bounds(np.maximum(self.low, low), np.minimum(self.high, high))

    def widened_to(self, low: int, high: int) -> "Bounds":
        """The narrowest ends around these and ``low``..``high``."""
        return Bounds(np.minimum(self.low, low), np.maximum(self.high, high))

    # What x must be for f(x) to be within these ends.

    def before_adding(self, number: int) -> "Bounds":
        return Bounds(self.low - number, self.high - number)

    def before_subtracting_from(self, number: int) -> "Bounds":
        """Of ``number - x``."""
        return Bounds(number - self.high, number - self.low)

    def before_multiplying(self, factor: int) -> "Bounds | None":
        """None where the factor is 0: nothing is asked of x."""
        if factor == 0:
            return None
        if factor < 0:
            return self.before_subtracting_from(0).before_multiplying(-factor)
        return Bounds(-(-self.low // factor), self.high // factor)

    def before_dividing(self, divisor: int, floor: bool) -> "Bounds | None":
        """Of ``x // divisor``, rounded down or towards zero; None where the divisor is not positive."""
        if divisor <= 0:
            return None
        low, high = self.low * divisor, self.high * divisor + divisor - 1
        if not floor:  # towards zero: more of the negative numbers become 0, and each one sooner
            low = np.where(self.low > 0, low, low - divisor + 1)
            high = np.where(self.high >= 0, high, self.high * divisor)
        return Bounds(low, high)

    def before_clamping(self, least: int | None, most: int | None, low: int, high: int) -> "Bounds":
        """Of ``clamp(x, least, most)``, where ``low`` and ``high`` are the ends of x's datatype.

        An end that the clamp itself keeps asks nothing of x.
        """
        lows, highs = self.low, self.high
        if least is not None:
            lows = np.where(np.less_equal(lows, least).astype(bool), low, lows)
        if most is not None:
            highs = np.where(np.greater_equal(highs, most).astype(bool), high, highs)
        return Bounds(lows, highs)

    def before_choosing(self, comparison: str, number: int, low: int, high: int) -> "Bounds":
        """Of ``where(x <comparison> number, <a constant within these ends>, x)``: a replaced element may have any
        value.

        The narrowest ends around the allowed values: exact unless there are forbidden values in between.
        """
        free = {
            "lt": (low, number - 1), "le": (low, number), "gt": (number + 1, high), "ge": (number, high),
            "eq": (number, number), "ne": (low, high),
        }[comparison]  # fmt: skip
        return self if free[0] > free[1] else self.widened_to(*free)

    # What moves elements and changes none.

    def uniform_of(self, rank: int) -> "Bounds":
        """The same ends, which must be uniform, for a tensor of another rank."""
        return Bounds.uniform(self.low.item(), self.high.item(), rank)

    def moved(self, move: Callable[[np.ndarray], Any]) -> "Bounds":
        return Bounds(move(self.low), move(self.high))

    def cut_out(
        self, axis: int, size: int, places: Sequence[int] | range, low: int, high: int
    ) -> "Bounds | None":
        """Of ``x[..., places, ...]`` along an axis of ``size``: other elements may be any number from low to high.

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

    # To and from what a spec has.

    def as_range(self, low: int, high: int) -> ValueRange | None:
        """As a spec says it, or None where it says nothing: every value of low..high is within, or none is.

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
        """Whether every value of a range is within these ends."""
        lows, highs = np.array(values.low, object), np.array(values.high, object)
        return bool((self.low <= lows).all() and (self.high >= highs).all())


def intersection(one: Bounds | None, other: Bounds) -> Bounds:
    return other if one is None else Bounds(np.maximum(one.low, other.low), np.minimum(one.high, other.high))


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
# The same comparison with its sides exchanged, and its opposite.
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
