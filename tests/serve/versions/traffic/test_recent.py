"""The last minutes of a model's traffic: what comes into a bin, and the times that the bins give."""

import numpy as np
import pytest
from halfeven.serve.batching.counters import BOUNDS_NS, Counters
from halfeven.serve.versions.traffic.recent import BIN_S, BINS, Recent, quantile_ns, together

from tests.serve.clock import Clock


def noted(recent: Recent, clock: Clock[float], *counters: Counters) -> None:
    clock.now += BIN_S
    recent.note(lambda: [one.copy() for one in counters])


def test_a_bin_has_what_came_since_the_one_before(random: np.random.Generator) -> None:
    clock, one, two = Clock(100.0), Counters("1"), Counters("2")
    recent = Recent(clock)
    counts = random.integers(0, 9, (4, 2))
    for first, second in counts:
        for counters, count in ((one, first), (two, second)):
            for _ in range(count):
                counters.executed([1000], 1, 2000)
            counters.failed(5)
        noted(recent, clock, one, two)
    assert [found.answered for found in recent.bins()] == counts.sum(1).tolist()
    assert [found.failed for found in recent.bins()] == [2] * 4


def test_before_its_time_nothing_is_read_and_only_the_last_five_minutes_are_kept() -> None:
    clock = Clock(100.0)
    recent = Recent(clock)
    recent.note(lambda: pytest.fail("it is not yet time"))
    for _ in range(BINS + 7):
        noted(recent, clock, Counters("1"))
    assert len(recent.bins()) == BINS and len({id(one) for one in recent.bins()}) == 1, (
        "idle bins are one object"
    )


def test_a_version_that_goes_or_is_loaded_anew_makes_no_negative_number() -> None:
    clock = Clock(100.0)
    recent, old, anew = Recent(clock), Counters("1"), Counters("1")
    for _ in range(5):
        old.executed([10], 1, 10)
    noted(recent, clock, old)
    anew.executed([10], 1, 10)
    noted(recent, clock, anew)
    noted(recent, clock)
    noted(recent, clock, anew)
    assert [one.answered for one in recent.bins()] == [5, 1, 0, 1]


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_quantile_is_right_to_its_bucket(random: np.random.Generator, share: float) -> None:
    clock, counters = Clock(100.0), Counters("1")
    recent = Recent(clock)
    waits = random.lognormal(13, 2, 500).astype(int).clip(1, 9_000_000_000)
    for start in range(0, 500, 5):
        counters.executed(waits[start : start + 5].tolist(), 5, 1_000)
    noted(recent, clock, counters)
    found = quantile_ns(together(recent.bins()), share)
    exact = np.quantile(waits + 1_000, share, method="inverted_cdf")
    bounds = np.array([0, *BOUNDS_NS])
    place = np.searchsorted(bounds, exact)
    assert found is not None and bounds[place - 1] <= found <= bounds[place]
    assert quantile_ns(together([]), share) is None


def test_a_request_that_was_run_in_parts_is_counted_by_its_original_time() -> None:
    counters = Counters("1")
    counters.joined(400_000, 500_000)
    assert counters.copy().answer_buckets.index(1) == BOUNDS_NS.index(1_000_000)
