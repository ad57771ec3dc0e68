"""The share of the gate's limits that a plan may use up on the samples that choose the plan."""

from dataclasses import dataclass, replace

import numpy as np

from ...models.spec.spec import ParityLimits
from ..gate.parity import UNIT_ROUNDOFF, min_sqnr_db
from ..inputs.synthetic import LARGEST

# The shares of the gate's limits that a plan may use up: the next one counts where the proof of a plan for the one
# before fails. A plan by the rules alone may use up all of that share, a plan that a search finds `SEARCHED` at most.
SHARES = (1.0, 0.75, 0.4)
SEARCHED = SHARES[1]
# The shares for what is given to FP32 besides where the proof misses a limit (`road`); after the last of them
# everything is.
RETREATS = (0.2, 0.1, 0.05)


def stricter(limits: ParityLimits, dtype: str, share: float) -> ParityLimits:
    """Limits with room to spare: the error's times ``share``, the ratios' as many decibels higher."""
    decibels = -20 * float(np.log10(share))
    return replace(
        limits,
        max_error_u=limits.max_error_u * share,
        min_sqnr_db=min_sqnr_db(limits, UNIT_ROUNDOFF[dtype]) + decibels,
        min_slice_sqnr_db=limits.min_slice_sqnr_db + decibels,
    )


@dataclass(frozen=True, slots=True)
class Aims:
    """``as_it_is``: the limits for the plan as the level's rules give it; ``searched``: for what a search finds.

    What passes by the rules alone is good enough at the limit; what a search finds lies close to its limit by nature.
    ``largest``: how large the scaled samples are whose answers must not leave half's range.
    """

    as_it_is: ParityLimits
    searched: ParityLimits
    largest: float = LARGEST


def aims(limits: ParityLimits, dtype: str, share: float) -> Aims:
    """The limits for a search that aims at ``share`` (of `SHARES`) of the gate's limits."""
    as_it_is, searched = (stricter(limits, dtype, one) for one in (share, min(share, SEARCHED)))
    return Aims(as_it_is, searched, largest_of(share))


def largest_of(share: float) -> float:
    """The size of scaled samples for a plan, up to twice that of the proof: where judged samples are larger than those
    that choose a plan, a value that stayed in half's range while planning leaves that range in the proof."""
    return LARGEST * min(max(SEARCHED / share, 1.0), 2.0)
