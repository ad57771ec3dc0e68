"""The values that an integer input may have: one pair of ends for all, or one pair for each place of its last axis.

An input that indexes a table (token ids) has as many valid values as the table has rows. The values of a request are
checked against the range before it is queued, so that no index out of range reaches a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Ends included. ``low`` and ``high`` have one element, or as many as the input's last axis has places."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def parse(cls, data: Any) -> "ValueRange":
        """Read ``[0, 99]``, or ``[[0, 99], [0, 9]]``, a pair for each place of the last axis. Raises ValueError."""
        pairs = data if isinstance(data, list) and data and isinstance(data[0], list) else [data]
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(type(end) is int for end in pair):
                raise ValueError(
                    f"{data!r} is no range: expected two whole numbers ([0, 99]), or such a pair for each place of "
                    "the last axis"
                )
            if pair[0] > pair[1]:
                raise ValueError(
                    f"the range {pair[0]}..{pair[1]} is empty: expected the smaller number first"
                )
        return cls(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))

    def to_json(self) -> list[Any]:
        pairs = [list(pair) for pair in zip(self.low, self.high, strict=True)]
        return pairs[0] if len(pairs) == 1 else pairs

    def fault(self, array: np.ndarray) -> str | None:
        """The fault of these integers, naming the first bad one and its place; None where all are in range."""
        if array.size == 0 or self._holds(array):
            return None
        bad = self.outside(array)
        place = tuple(int(index) for index in np.unravel_index(bad.argmax(), bad.shape))
        column = place[-1] if len(self.low) > 1 else 0
        where = f" at [..., {column}]" if len(self.low) > 1 else ""
        return (
            f"values{where} must lie in {self.low[column]}..{self.high[column]}, got {int(array[place])} at "
            f"{list(place)}"
        )

    def outside(self, array: np.ndarray) -> np.ndarray:
        """True for each of the array's integers that is out of range, in the array's shape."""
        return (array < self._ends(self.low)) | (array > self._ends(self.high))

    def within(self, other: "ValueRange") -> bool:
        """True if every value of this range is one of the other's."""
        pairs = _side_by_side(self, other)
        return all(low >= least and high <= most for low, high, least, most in pairs)

    def both(self, other: "ValueRange") -> "ValueRange":
        """The values that are in both ranges; an end may come out below the other where there is none."""
        pairs = list(_side_by_side(self, other))
        return ValueRange(
            tuple(max(low, least) for low, _, least, _ in pairs),
            tuple(min(high, most) for _, high, _, most in pairs),
        )

    def __str__(self) -> str:
        pairs = [f"{low}..{high}" for low, high in zip(self.low, self.high, strict=True)]
        return pairs[0] if len(pairs) == 1 else f"[{', '.join(pairs)}]"

    def _holds(self, array: np.ndarray) -> bool:
        """True if all integers are in range, in two passes: every request takes this time."""
        if len(self.low) == 1:
            least, most = np.minimum.reduce(array, axis=None), np.maximum.reduce(array, axis=None)
            return self.low[0] <= int(least) and int(most) <= self.high[0]
        rows = array.reshape(-1, array.shape[-1])
        least, most = rows.min(axis=0).tolist(), rows.max(axis=0).tolist()
        return all(map(int.__le__, self.low, least)) and all(map(int.__ge__, self.high, most))

    def _ends(self, ends: tuple[int, ...]) -> Any:
        if len(ends) == 1:
            return ends[0]
        # numpy compares all integers of 64 bits and fewer exactly, and Python's own hundreds of times as slowly.
        kinds = (kind for kind in (np.int64, np.uint64) if _fit(ends, np.iinfo(kind)))
        return np.array(ends, next(kinds, object))


def _fit(ends: Sequence[int], limits: np.iinfo) -> bool:
    return limits.min <= min(ends) and max(ends) <= limits.max


_BYTES_OF_BOOL = ValueRange((0,), (1,))  # what an engine computes with any other byte is not defined


def fault_of(array: np.ndarray, valid: ValueRange | None) -> str | None:
    """The fault of integers that have a range, or of the bytes of a BOOL; None where there is none."""
    if array.dtype != np.bool_:
        return None if valid is None else valid.fault(array)
    fault = _BYTES_OF_BOOL.fault(array.view(np.uint8))
    return fault and f"{fault}, for they are the bytes of a BOOL"


def _side_by_side(one: ValueRange, other: ValueRange) -> list[tuple[int, int, int, int]]:
    width = max(len(one.low), len(other.low))

    def spread(ends: Sequence[int]) -> Sequence[int]:
        return ends if len(ends) == width else tuple(ends) * width

    columns = (spread(one.low), spread(one.high), spread(other.low), spread(other.high))
    return list(zip(*columns, strict=True))
