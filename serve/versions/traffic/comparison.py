"""Two answers to the same request, compared output by output, in units of u·S.

u is the half's unit roundoff, S the larger of the output's largest magnitude over the judging samples and over this
answer: callers may send other values than the judging samples have. NaN, infinities and sentinels must be in the same
places.
"""

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....exporters.gate.measured import in_units
from ....exporters.gate.parity import UNIT_ROUNDOFF, measure
from ....exporters.gate.trial import Pair
from ....models.spec.spec import ModelSpec, TensorSpec
from ....models.store.store import Version

# 1/u = 2048 is S itself for FP16.
BOUNDS_U = (
    0.25,
    0.5,
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Figures of a version's own proof: u, S of each output, and the outputs whose integers tied."""

    u: float
    largest: Mapping[str, float]
    tying: frozenset[str] = frozenset()


def scale_of(version: Version, form: str | None = None) -> Scale:
    """The scale from the stored parity report (of this form, where it has one); without any, S is each answer's own."""
    u = UNIT_ROUNDOFF[version.manifest["half"] or "fp16"]
    if not version.has("parity.json"):
        return Scale(u, {})

    def found(proofs: Mapping[str, Any]) -> Scale:
        report = proofs["forms"].get(form) or next(iter(proofs["forms"].values()), None)
        outputs = report["outputs"] if report else []
        return Scale(
            u,
            {output["name"]: float(output.get("scale") or 0.0) for output in outputs},
            frozenset(output["name"] for output in outputs if output["tied"]),
        )

    return version.read("parity.json", found)


@dataclass(slots=True)
class Gap:
    """One output over all requests compared. ``buckets`` counts requests by their worst error, by ``BOUNDS_U``."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_U) + 1))
    total_u: float = 0.0  # of the finite ones
    largest_u: float = 0.0
    over: int = 0
    flipped: int = 0
    decisions: int = 0
    pairs: int = 0  # of rows of one request, distinct in the reference
    tied: int = 0
    swapped: int = 0  # though further apart than the allowed error (`exporters/gate/order.py`)

    def to_json(self) -> dict[str, Any]:
        bounds = [*map(str, BOUNDS_U), "+Inf"]
        return {
            "requests": sum(self.buckets),
            "over_limit": self.over,
            "largest_u": self.largest_u if math.isfinite(self.largest_u) else None,
            "histogram_u": dict(zip(bounds, self.buckets, strict=True)),
            **({"decisions": self.decisions, "flipped": self.flipped} if self.decisions else {}),
            **({"pairs": self.pairs, "tied": self.tied, "swapped": self.swapped} if self.pairs else {}),
        }


class AnswerComparison:
    """Gathers gaps. `take` is called from one thread, the reading from any."""

    def __init__(self, spec: ModelSpec, scale: Scale) -> None:
        self._spec = spec
        self._scale = scale
        self._gaps = {tensor.name: Gap() for tensor in spec.outputs}
        self._lock = threading.Lock()

    def take(self, reference: Sequence[np.ndarray], candidate: Sequence[np.ndarray]) -> float:
        """The worst error of this request in units of the limit: above 1 it is over. Outputs in the spec's order."""
        worst = 0.0
        for tensor, expected, came in zip(self._spec.outputs, reference, candidate, strict=True):
            worst = max(worst, self._take_one(tensor, expected, came))
        return worst

    def _take_one(self, tensor: TensorSpec, expected: np.ndarray, came: np.ndarray) -> float:
        if not self._spec.batched:
            expected, came = expected[None], came[None]
        found = measure(tensor, [Pair(tuple(range(len(expected))), expected, came)], self._scale.u)
        scale = max(self._scale.largest.get(tensor.name, 0.0), found.scale)
        error_u = in_units(found.worst, self._scale.u, scale) if not found.faults else math.inf
        if error_u and tensor.name in self._scale.tying:
            error_u = 0.0  # its proof found ties; whether these differences are ties is not checked here
        limit_u = self._spec.parity.max_error_u
        with self._lock:
            gap = self._gaps[tensor.name]
            gap.buckets[bisect_left(BOUNDS_U, error_u)] += 1
            gap.total_u += error_u if math.isfinite(error_u) else 0.0
            gap.largest_u = max(gap.largest_u, error_u)
            gap.over += not error_u <= limit_u
            if found.decisions is not None:
                gap.decisions += found.decisions.decisions
                gap.flipped += found.decisions.flipped
            if found.order is not None:
                gap.pairs += found.order.pairs
                gap.tied += found.order.tied
                gap.swapped += found.order.swapped
        return error_u / limit_u if limit_u else math.inf if error_u else 0.0

    def gaps(self) -> dict[str, Gap]:
        """A copy as of one moment."""
        with self._lock:
            return {name: replace(gap, buckets=list(gap.buckets)) for name, gap in self._gaps.items()}

    def to_json(self) -> dict[str, Any]:
        return {name: gap.to_json() for name, gap in self.gaps().items()}
