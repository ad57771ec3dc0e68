"""FP32's own noise: no rule asks more of a half than FP32 would reach when it is evaluated another way.

The original is evaluated again, in FP64 or with other sums (`exporters/proof/prove.py`), and measured as a half
is. The difference is noise: a slice that is lost in noise is not judged, and no limit is narrower than twice the
noise. The limits stay finite: where FP32 fails a rule, a half that is more than twice as bad still fails it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...models.spec.spec import ParityLimits
from .divergence import Divergence
from .rule_verdicts import DecisionVerdict

ROOM = 2.0  # times the noise: of two evaluations that nobody prefers, each has its own
ROOM_DB = 6.0


@dataclass(frozen=True, slots=True)
class Noise:
    """FP32's own noise in one output. ``slices_db``: for every non-batch axis, the decibels of each slice.

    ``numbers``: ``error`` (of the largest magnitude), ``sqnr_db``, ``kl_nats`` (of the worst sample) and ``flips``
    (share of the decisions).
    """

    slices_db: tuple[np.ndarray, ...]
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, divergence: Divergence, decisions: DecisionVerdict | None) -> "Noise":
        numbers = {
            "error": divergence.in_units(divergence.worst, 1.0),
            "sqnr_db": divergence.sqnr_db,
            "kl_nats": decisions.kl_nats if decisions else 0.0,
            "flips": decisions.flipped / max(decisions.decisions, 1) if decisions else 0.0,
        }
        return cls(divergence.ratios(), numbers)


def with_room(limits: ParityLimits, noise: Mapping[str, float], u: float, min_sqnr_db: float) -> ParityLimits:
    """The limits, none narrower than the noise allows. ``min_sqnr_db``: the one for this u (`limits.min_sqnr_db`)."""
    return replace(
        limits,
        max_error_u=max(limits.max_error_u, ROOM * noise["error"] / u),
        min_sqnr_db=min(min_sqnr_db, noise["sqnr_db"] - ROOM_DB),
        max_kl_nats=max(limits.max_kl_nats, ROOM**2 * noise["kl_nats"]),  # goes by the square of the error
        max_flips=max(limits.max_flips, ROOM * noise["flips"]),
    )
