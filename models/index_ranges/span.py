"""Intervals of the integers of a tensor, and arithmetic with such intervals.

For graphs of ATen operations (`spans.py`) and of ONNX (`exporters/onnx/reading/index_ranges.py`). Python's integers:
whether a result wraps in its datatype is checked where the datatype is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST = (1 << 63) - 1  # of INT64: what is not known of a size


@dataclass(frozen=True, slots=True)
class Span:
    """Ends included. ``below``: expression of a free size → n, where every value is less than that size + n."""

    low: int
    high: int
    below: Mapping[str, int] = field(default_factory=dict)

    def plus(self, other: "Span") -> "Span":
        below = {size: more + other.high for size, more in self.below.items()}
        for size, more in other.below.items():
            below[size] = min(more + self.high, below.get(size, LARGEST))
        return Span(self.low + other.low, self.high + other.high, below)

    def moved(self, number: int) -> "Span":
        return self.plus(Span(number, number))

    def negated(self) -> "Span":
        return Span(-self.high, -self.low)

    def times(self, other: "Span") -> "Span":
        corners = [x * y for x in (self.low, self.high) for y in (other.low, other.high)]
        below: Mapping[str, int] = {}
        if self.low >= 0 and other.low >= 0 and other.high <= 1:
            below = self.below
        elif other.low >= 0 and self.low >= 0 and self.high <= 1:
            below = other.below
        return Span(min(corners), max(corners), below)

    def magnitude(self) -> "Span":
        far = max(abs(self.low), abs(self.high))
        return Span(0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high)), far)

    def larger(self, other: "Span") -> "Span":
        return Span(max(self.low, other.low), max(self.high, other.high), self._both(other))

    def smaller(self, other: "Span") -> "Span":
        below = dict(self.below)
        for size, more in other.below.items():
            below[size] = min(more, below.get(size, more))
        return Span(min(self.low, other.low), min(self.high, other.high), below)

    def joined(self, other: "Span") -> "Span":
        """The span of values that are in one span or the other."""
        return Span(min(self.low, other.low), max(self.high, other.high), self._both(other))

    def remainder(self, divisor: "Span") -> "Span | None":
        """With the divisor's sign; None where that may be zero or negative."""
        return Span(0, divisor.high - 1, divisor.moved(-1).below) if divisor.low > 0 else None

    def quotient(self, divisor: "Span", floor: bool) -> "Span | None":
        """Rounded down or towards zero; None where the divisor is no positive constant."""
        number = divisor.low
        if number != divisor.high or number <= 0:
            return None
        if floor:
            return Span(self.low // number, self.high // number)
        ends = [end // number if end >= 0 else -(-end // number) for end in (self.low, self.high)]
        return Span(ends[0], ends[1])

    def summed(self, size: "Span") -> "Span":
        """The span of a sum of ``size`` values, or of the first of them."""
        below = dict(size.below) if self.high <= 1 else {}
        return Span(min(0, self.low * size.high), max(0, self.high * size.high), below)

    def places(self) -> "Span":
        """The places along a dimension of this size, from 0 on."""
        last = self.moved(-1)
        return Span(0, max(last.high, 0), last.below)

    def _both(self, other: "Span") -> dict[str, int]:
        return {
            size: max(more, other.below[size]) for size, more in self.below.items() if size in other.below
        }


def constant(number: int) -> Span:
    return Span(number, number)
