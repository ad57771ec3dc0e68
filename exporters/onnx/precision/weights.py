"""The constants of an ONNX file in half, rounded to nearest even with sign and zeros kept, and their rounding errors.

The readers of a constant over budget (`exporters/policy/weights.py`) stay in FP32.
"""

from collections.abc import Mapping

import numpy as np

from ...policy.weights import Entry, in_range, measure, rounded


class HalfConstants:
    """Every constant of a program in half, made once."""

    def __init__(self, weights: Mapping[str, np.ndarray], dtype: str) -> None:
        self._weights, self._dtype = weights, dtype
        self.in_range: set[str] = set()
        self._halves: dict[str, np.ndarray] = {}
        self._entries: dict[str, Entry] = {}

    def half(self, name: str) -> np.ndarray:
        if name not in self._halves:
            original = np.asarray(self._weights[name], np.float32, order="C")
            half = rounded(original, self._dtype)
            self._halves[name] = in_range(original, half) if name in self.in_range else half
        return self._halves[name]

    @property
    def asked(self) -> list[str]:
        """The constants that were weighed."""
        return list(self._entries)

    def bring_into_range(self, name: str) -> None:
        """From now on elements of this constant that vanish in half become half's least number of their sign, and
        elements that overflow its largest."""
        self.in_range.add(name)
        self._halves.pop(name, None)

    def entry(self, name: str) -> Entry:
        """The error of rounding the constant to half, as it is in the file."""
        if name not in self._entries:
            self._entries[name] = measure(name, np.asarray(self._weights[name], np.float32), self._dtype)
        return self._entries[name]
