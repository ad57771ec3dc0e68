"""The numbers by which a version is rejected. `settings.py` has them as options; these are the defaults."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrialRules:
    """``keep_previous_s``: seconds that the replaced version stays loaded and the new one is on trial (0: neither).

    A version on trial is rejected when at least ``faults`` of its answers, and at least the share ``fault_share`` of
    them, were faulty (failed, not finite, rescued) where the other version's were not, or when its batches took
    ``slower`` times as long as the other's of the same size (over at least ``timed_batches`` of them), and a batch that
    both run in turns does too.

    ``parity_sample`` is the share of a half's requests that its FP32 original answers too. The half is rejected
    when ``drift_over`` of the last ``drift_of`` of those err beyond the gate's limit. After the first one that does,
    every request is checked until ``drift_of`` have been. Of the inputs that err so, ``keep_drifted`` are kept for the
    next conversion.
    """

    keep_previous_s: float = 600.0
    faults: int = 3
    fault_share: float = 0.01
    slower: float = 3.0
    timed_batches: int = 200
    parity_sample: float = 0.001
    drift_over: int = 5
    drift_of: int = 50
    keep_drifted: int = 0
