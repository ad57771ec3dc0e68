"""The error of rounding a weight to half, and whether half can hold it: for captured programs and ONNX files.

Weights are rounded as torch's ``.to(half)`` does: to the nearest even, subnormal below 2⁻¹⁴ (fp16), zero below
2⁻²⁵, infinite from 65,520 on. A weight whose largest number would become infinite, or whose rounding error is out of
proportion (`BUDGET`), stays FP32. What guards a division is brought into half's range (`in_range`).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

NUMPY_HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
BUDGET = 4.0  # ‖rounded − weight‖ ÷ ‖weight‖, in u: under 1 where all numbers are in half's range, far above if not
# The relative error that rounding may cost a weight of one number, such as an eps: it may be subnormal, not vanish.
NUMBER = 2.0**-6
LEAST_OF_A_MASK = 1e9  # a number as large as this stands for infinity
# The meta of a weight's node has this key where no element may leave half's range (`in_range`).
IN_RANGE = "halfeven_in_range"


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight. ``worst``: largest error ÷ largest magnitude; ``error_u``: norm of the errors ÷ norm, in u;
    shares are of its non-zero elements; ``saturated`` counts finite elements that become infinite; ``largest``: finite
    magnitude."""

    weight: str
    elements: int
    worst: float
    error_u: float
    underflowed: float
    subnormal: float
    saturated: int
    largest: float

    @property
    def over_budget(self) -> bool:
        fits = self.worst <= NUMBER if self.elements == 1 else self.error_u <= BUDGET
        return self.saturated > 0 or not fits

    def keeps_its_readers(self, searched: bool) -> bool:
        """True if the nodes that read it stay in FP32 by rule: where half would be infinite, or no search decides."""
        return self.over_budget and (self.saturated > 0 or not searched)

    @property
    def is_wide(self) -> bool:
        """True if numbers of it, which are no values of a mask, leave half's range: what takes rows out of it may take
        them, though no sample does."""
        return self.saturated > 0 and self.largest < LEAST_OF_A_MASK

    @property
    def reason(self) -> str:
        return f"the weight '{self.weight}' does not fit in half"

    @property
    def evidence(self) -> str:
        if self.saturated:
            return f"{self.saturated} of {self.elements} elements would become infinite"
        return (
            f"rounding error {self.error_u:.3g}u of its norm, {self.underflowed:.2%} of it would become zero"
        )

    def to_json(self) -> dict[str, Any]:
        row = asdict(self) | {"fp32": self.over_budget}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def rounded(array: np.ndarray, half: str) -> np.ndarray:
    """The FP32 array in half (``fp16`` or ``bf16``), as torch's ``.to(half)`` rounds."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(NUMPY_HALVES[half])


def measure(name: str, weight: np.ndarray | float, half: str) -> Entry:
    """The error of rounding ``weight`` (FP32) to ``half``."""
    with np.errstate(over="ignore"):
        weight = np.asarray(weight, np.float32)
    limits, came = ml_dtypes.finfo(NUMPY_HALVES[half]), rounded(weight, half).astype(np.float32)
    is_finite = np.isfinite(weight)
    nonzero = int(np.count_nonzero(weight))
    lost = nonzero - int(np.count_nonzero(came))
    tiny = int(np.count_nonzero(np.abs(came) < np.float32(limits.smallest_normal))) - (weight.size - nonzero)
    finite = weight[is_finite]
    gap = finite - came[is_finite]
    largest, norm = float(np.abs(finite).max(initial=0.0)), _norm(finite)
    return Entry(
        name,
        weight.size,
        worst=float(np.abs(gap).max(initial=0.0)) / largest if largest else 0.0,
        error_u=_norm(gap) / norm / (float(limits.eps) / 2) if norm else 0.0,
        underflowed=lost / max(nonzero, 1),
        subnormal=max(tiny - lost, 0) / max(nonzero, 1),
        saturated=int(np.count_nonzero(np.isinf(came) & is_finite)),
        largest=largest,
    )


def in_range(original: np.ndarray, half: np.ndarray) -> np.ndarray:
    """``half``, which is ``original`` rounded, with half's smallest number where a number became 0, and its largest
    where a number became infinite."""
    limits = ml_dtypes.finfo(half.dtype)
    vanished, overflowed = (half == 0) & (original != 0), np.isinf(half) & np.isfinite(original)
    smallest = float(limits.smallest_normal) * float(limits.eps)
    half = np.where(vanished, np.copysign(np.float32(smallest), original).astype(half.dtype), half)
    return np.where(overflowed, np.copysign(np.float32(limits.max), original).astype(half.dtype), half)


def _norm(array: np.ndarray) -> float:
    """The norm in float64: squares of numbers near 1e-30 are nothing in FP32."""
    return math.sqrt(np.square(array, dtype=np.float64).sum())
