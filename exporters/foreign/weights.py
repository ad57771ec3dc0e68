"""Constants in half: rounded to nearest even with sign and zeros kept, never clamped, with a ledger.

A constant that overflows or loses more than `BUDGET` in half is not halved: whoever reads it stays in FP32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...models.engines.arrays import to_numpy, to_torch

BUDGET = 2.0**-6  # relative error of the worst slice; rounding alone costs 2^-11 (2^-8 for bf16)
NEGLIGIBLE = 2.0**-20  # slices this far below the largest are not held against it, as in the gate
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Entry:
    """What half precision does to one constant.

    ``error`` is the relative one of the worst slice, ``whole_error`` that of the constant as a whole: where it is
    added to something, its own small elements do not matter.
    """

    name: str
    error: float
    whole_error: float
    underflowed: float  # share of the non-zero elements that become zero
    saturated: int  # finite elements that become infinite
    largest: float

    def fault(self, dtype: str, added: bool) -> str | None:
        """Why it cannot be half, or None where it can; ``added``: all its reader does is to add it."""
        if self.saturated:
            return f"constant '{self.name}' reaches {self.largest:.3g}, beyond {dtype}'s range"
        error = self.whole_error if added else self.error
        if not error <= BUDGET:
            return f"constant '{self.name}' would lose {error:.2g} of itself in {dtype}"
        return None


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The FP32 array in half, as torch's ``.to(half)`` rounds."""
    fresh = np.array(array, np.float32, order="C", copy=True)
    return to_numpy(to_torch(fresh).to(TORCH[dtype]))


class Ledger:
    """Every constant of a program in half, made once."""

    def __init__(self, weights: Mapping[str, np.ndarray], dtype: str) -> None:
        self._weights, self._dtype = weights, dtype
        self._in_range: set[str] = set()
        self._halves: dict[str, np.ndarray] = {}
        self._entries: dict[str, Entry] = {}

    def half(self, name: str) -> np.ndarray:
        if name not in self._halves:
            whole = self._weights[name]
            half = rounded(whole, self._dtype)
            self._halves[name] = _in_range(whole, half) if name in self._in_range else half
        return self._halves[name]

    @property
    def asked(self) -> list[str]:
        """The constants that were weighed."""
        return list(self._entries)

    def bring_into_range(self, name: str) -> None:
        """What vanishes of this constant in half becomes half's least number of its sign, what overflows its
        largest."""
        self._in_range.add(name)
        self._halves.pop(name, None)

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            self._entries[name] = _entry(name, self._weights[name], self.half(name).astype(np.float32))
        return self._entries[name]

    def fault(self, name: str, added: bool = False) -> str | None:
        return self.entry(name).fault(self._dtype, added)


def _in_range(whole: np.ndarray, half: np.ndarray) -> np.ndarray:
    inward = np.nextafter(half, np.sign(whole).astype(half.dtype))  # from 0 outwards, from infinity inwards
    gone = ((half == 0) & (whole != 0)) | (np.isinf(half) & np.isfinite(whole))
    return np.where(gone, inward, half)


def _entry(name: str, whole: np.ndarray, half: np.ndarray) -> Entry:
    finite = np.isfinite(whole)
    alive = finite & (whole != 0)
    saturated = int((finite & ~np.isfinite(half)).sum())
    lost = float((alive & (half == 0)).sum()) / max(1, int(alive.sum()))
    largest = float(np.abs(whole, where=finite, out=np.zeros_like(whole)).max(initial=0.0))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(finite, half - whole, 0.0)
    finite_whole = np.where(finite, whole, 0.0)
    return Entry(
        name, _worst_slice(finite_whole, gap), _relative(finite_whole, gap), lost, saturated, largest
    )


def _relative(whole: np.ndarray, gap: np.ndarray) -> float:
    size, error = (float(np.sqrt(np.square(part, dtype=np.float64).sum())) for part in (whole, gap))
    return error / size if size else 0.0


def _worst_slice(whole: np.ndarray, gap: np.ndarray) -> float:
    """The worst relative error (L2) among the slices along the first and the last axis; elements of a vector."""
    if not whole.size or not np.isfinite(gap).all():
        return float("inf") if whole.size else 0.0
    if whole.ndim < 2:
        return _worst(np.abs(whole), np.abs(gap))
    found = []
    for axis in (0, whole.ndim - 1):
        others = tuple(other for other in range(whole.ndim) if other != axis)
        found.append(_worst(*(np.sqrt(np.square(p, dtype=np.float64).sum(others)) for p in (whole, gap))))
    return max(found)


def _worst(size: np.ndarray, error: np.ndarray) -> float:
    judged = (size > 0) & (size >= NEGLIGIBLE * np.max(size, initial=0.0))
    ratio = np.divide(error, size, out=np.zeros_like(error), where=judged)
    return float(np.max(ratio, initial=0.0))
