"""The half's absolute errors, signal and noise against the original, gathered in one pass.

All in FP64. What is left out (NaN, infinities and sentinels of the reference) counts as zero signal and
zero noise; `parity.py` holds those elements by other rules. A candidate that is not finite where the
reference is a number is infinitely wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..policy.weights import LEAST_OF_A_MASK
from .measured import MAX_SAMPLES, in_units, thinned
from .rule_verdicts import AxisSlices

SENTINEL = LEAST_OF_A_MASK
MAX_SLICES = 4096
MAX_PLOTTED_SLICES = 256
MIN_SLICE_PEAK = 2.0**-20  # of S: a smaller slice is dust that no half can hold
# A slice whose largest magnitude is below the error that every element may have is not held to a ratio, but it may not
# be lost: with fewer decibels than these nothing of it is left.
FAINT_U = 4.0
LOST_DB = 10.0
# The least SQNR of a slice of FP32 against itself (`noise.py`): with less, FP32 cannot hold the slice to 30 dB with any
# certainty.
TOLD_APART_DB = 40.0


def left_out(reference: np.ndarray) -> np.ndarray:
    """True for each element of the reference that is NaN, infinite, or so large that it can only mean a mask."""
    return ~(np.abs(reference) < SENTINEL)


def largest(values: np.ndarray | Sequence[np.ndarray]) -> float:
    """The largest magnitude of what is not left out; 0 where there is none."""
    size = np.abs(np.asarray(values) * 1.0)  # int8 cannot hold the magnitude of -128
    return float(size[size < SENTINEL].max(initial=0.0))


def decibels(signal: np.ndarray | float, noise: np.ndarray | float) -> np.ndarray:
    """10·log10(signal/noise): +inf where there is no noise at all, −inf for noise without any signal."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.equal(noise, 0.0), np.inf, 10.0 * np.log10(np.divide(signal, noise)))


def _stretches(values: np.ndarray, most: int) -> list[np.ndarray]:
    return np.array_split(values, min(len(values), most)) if len(values) else []


@dataclass(slots=True)
class _Axis:
    """Sums of squares and largest magnitude per slice; it grows with the longest sample seen."""

    signal: np.ndarray = field(default_factory=lambda: np.zeros(0))
    noise: np.ndarray = field(default_factory=lambda: np.zeros(0))
    peak: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, signal: np.ndarray, noise: np.ndarray, peak: np.ndarray) -> None:
        if missing := max(0, len(signal) - len(self.signal)):
            self.signal, self.noise, self.peak = (
                np.pad(sums, (0, missing)) for sums in (self.signal, self.noise, self.peak)
            )
        seen = slice(0, len(signal))
        self.signal[seen] += signal
        self.noise[seen] += noise
        self.peak[seen] = np.maximum(self.peak[seen], peak)


@dataclass(slots=True)
class Divergence:
    """The differences of a half from its original. ``errors`` maps a sample to its largest |C − R|."""

    scale: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    errors: dict[int, float] = field(default_factory=dict)
    axes: list[_Axis] = field(default_factory=list)

    def add(self, samples: Sequence[int], reference: np.ndarray, candidate: np.ndarray) -> None:
        """Take in FP64 arrays of one shape, axis 0 the samples."""
        skip = left_out(reference)
        size = np.where(skip, 0.0, np.abs(reference))
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.where(skip, 0.0, np.abs(candidate - reference))
            error[np.isnan(error)] = np.inf
            power, noise = size * size, error * error
        self.scale = max(self.scale, float(size.max(initial=0.0)))
        self.signal += float(power.sum())
        self.noise += float(noise.sum())
        row_errors = error.max(axis=tuple(range(1, error.ndim)), initial=0.0)
        for sample, worst in zip(samples, row_errors, strict=True):
            self.errors[sample] = max(self.errors.get(sample, 0.0), float(worst))
        self._add_slices(power, noise, size)

    def _add_slices(self, power: np.ndarray, noise: np.ndarray, size: np.ndarray) -> None:
        while len(self.axes) < power.ndim - 1:
            self.axes.append(_Axis())
        for axis, sums in enumerate(self.axes, start=1):
            others = tuple(other for other in range(power.ndim) if other != axis)
            sums.add(power.sum(axis=others), noise.sum(axis=others), size.max(axis=others, initial=0.0))

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def worst_sample(self) -> int | None:
        return max(self.errors, key=self.errors.__getitem__, default=None)

    @property
    def sqnr_db(self) -> float:
        return float(decibels(self.signal, self.noise))

    def slices(self, u: float, noise: Sequence[np.ndarray] = ()) -> tuple[AxisSlices, ...]:
        """Every non-batch axis with its slices: at most 4,096, evenly spaced over a longer axis.

        ``noise``: for each of these axes, the decibels of every slice of FP32 against itself (`ratios`).
        """
        return tuple(
            self._slices(place + 1, sums, u, noise[place] if place < len(noise) else np.zeros(0))
            for place, sums in enumerate(self.axes)
        )

    def ratios(self) -> tuple[np.ndarray, ...]:
        """The decibels of each slice, for every non-batch axis."""
        return tuple(decibels(sums.signal, sums.noise) for sums in self.axes)

    def _slices(self, axis: int, sums: _Axis, u: float, noise: np.ndarray) -> AxisSlices:
        length = len(sums.signal)
        picked = np.linspace(0, length - 1, min(length, MAX_SLICES)).round().astype(np.int64)
        values, peak = decibels(sums.signal[picked], sums.noise[picked]), sums.peak[picked]
        values = np.where(peak > MIN_SLICE_PEAK * self.scale, values, np.nan)
        itself = np.pad(noise, (0, max(0, length - len(noise))), constant_values=np.inf)[picked]
        faint = (peak <= FAINT_U * u * self.scale) & (values >= LOST_DB)
        reported = ~np.isnan(values) & (faint | (itself < TOLD_APART_DB))
        judged = np.flatnonzero(~np.isnan(values) & ~reported)
        worst = judged[values[judged].argmin()] if len(judged) else None
        return AxisSlices(
            axis=axis,
            length=length,
            judged=len(judged),
            reported=int(reported.sum()),
            worst_index=None if worst is None else int(picked[worst]),
            worst_db=np.inf if worst is None else float(values[worst]),
            db=tuple(float(np.fmin.reduce(stretch)) for stretch in _stretches(values, MAX_PLOTTED_SLICES)),
        )

    def errors_in_order(self) -> tuple[float, ...]:
        """The largest error of each sample, absolute, in the samples' order; thinned where there are many."""
        return thinned(np.array([self.errors[sample] for sample in sorted(self.errors)]), MAX_SAMPLES)

    def in_units(self, error: float, u: float) -> float:
        return in_units(error, u, self.scale)
