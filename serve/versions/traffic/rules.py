"""When a version is rejected, in numbers. `settings.py` has them as options; these are the defaults."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """``keep_previous_s``: so long the replaced version stays loaded and the new one is on trial (0: neither).

    On trial a version goes back when at least ``faults`` of its answers, and at least ``fault_share`` of them,
    were faults which the other version did not commit (failed, not finite, rescued), or when its batches took
    ``slower`` times as long as the other's of the same size (over at least ``timed_batches`` of them).

    ``parity_sample`` is the share of a half's requests that its FP32 whole answers too. The half is rejected
    when ``drift_over`` of the last ``drift_of`` of those err beyond the gate's limit; the first one that does
    has every request checked until ``drift_of`` have been.
    """

    keep_previous_s: float = 600.0
    faults: int = 3
    fault_share: float = 0.01
    slower: float = 3.0
    timed_batches: int = 200
    parity_sample: float = 0.001
    drift_over: int = 5
    drift_of: int = 50
