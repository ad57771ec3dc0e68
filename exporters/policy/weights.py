"""The error of rounding a weight to half, and whether half can hold it: for captured programs and ONNX files.

Weights are rounded as torch's ``.to(half)`` does: to the nearest even, subnormal below 2⁻¹⁴ (fp16), zero below
2⁻²⁵, infinite from 65,520 on. A weight whose largest number would become infinite, or whose rounding error is out of
proportion (`BUDGET`), stays FP32. What guards a division is brought into half's range (`in_range`).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

BUDGET = 4.0  # ‖rounded − weight‖ ÷ ‖weight‖, in u: under 1 where all numbers are in half's range, far above if not
# The same for a weight of one number, such as an eps: it may be subnormal, but must not vanish.
NUMBER = 2.0**-6
IN_RANGE = (
    "halfeven_in_range"  # in the meta of a weight's node: no element may leave half's range (`in_range`)
)


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


def measure(name: str, weight: Tensor, half: torch.dtype) -> Entry:
    """The error of rounding ``weight`` (FP32) to ``half``."""
    with torch.no_grad():
        limits = torch.finfo(half)
        rounded = weight.to(half)
        saturated = int((rounded.isinf() & weight.isfinite()).sum())
        nonzero = int(torch.count_nonzero(weight))
        lost = nonzero - int(torch.count_nonzero(rounded))
        tiny = int(torch.count_nonzero(rounded.abs() < limits.smallest_normal)) - (weight.numel() - nonzero)
        finite = weight[weight.isfinite()]
        gap = (weight - rounded.float())[weight.isfinite()]
        largest, norm = float(finite.abs().max()) if finite.numel() else 0.0, _norm(finite)
        return Entry(
            name,
            weight.numel(),
            worst=float(gap.abs().max()) / largest if largest else 0.0,
            error_u=_norm(gap) / norm / (limits.eps / 2) if norm else 0.0,
            underflowed=lost / max(nonzero, 1),
            subnormal=max(tiny - lost, 0) / max(nonzero, 1),
            saturated=saturated,
            largest=largest,
        )


def in_range(original: Tensor, half: Tensor) -> Tensor:
    """``half``, which is ``original`` rounded, with half's smallest number where a number became 0, and its largest
    where a number became infinite."""
    limits = torch.finfo(half.dtype)
    vanished, overflowed = (half == 0) & (original != 0), half.isinf() & original.isfinite()
    half = torch.where(vanished, (original.sign() * limits.smallest_normal * limits.eps).to(half.dtype), half)
    return torch.where(overflowed, (original.sign() * limits.max).to(half.dtype), half)


def _norm(tensor: Tensor) -> float:
    """In float64: squares of numbers near 1e-30 are nothing in FP32."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
