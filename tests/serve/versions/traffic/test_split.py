"""Shares are kept exactly and keys stay where they are."""

import subprocess
import sys

import pytest
from halfeven.serve.versions.traffic.split import Spread, Sticky

KEYS = [f"caller-{i}" for i in range(4000)]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.37, 0.5, 1.0])
def test_a_share_is_held_over_any_stretch_of_requests(share: float) -> None:
    spread = Spread(share)
    taken = [spread.takes() for _ in range(3000)]
    for start in (0, 17, 1000):
        assert abs(sum(taken[start : start + 1000]) - share * 1000) <= 3
    assert sum(taken) == pytest.approx(share * 3000, abs=3)


def test_a_share_does_not_fall_in_step_with_callers_who_come_in_turns() -> None:
    spread = Spread(0.1)
    of_each = [0] * 10
    for i in range(10_000):
        of_each[i % 10] += spread.takes()
    assert all(90 <= count <= 110 for count in of_each), of_each


def test_a_key_stays_and_a_larger_share_only_adds_to_it() -> None:
    ten, twenty = Sticky(0.1, "net@3"), Sticky(0.2, "net@3")
    first = {key for key in KEYS if ten.takes(key)}
    assert first == {key for key in KEYS if ten.takes(key)}
    assert 0.08 < len(first) / len(KEYS) < 0.12
    assert first <= {key for key in KEYS if twenty.takes(key)}


def test_another_version_tries_other_callers() -> None:
    three, four = Sticky(0.1, "net@3"), Sticky(0.1, "net@4")
    both = [key for key in KEYS if three.takes(key) and four.takes(key)]
    assert len(both) < 0.02 * len(KEYS)


def test_requests_without_a_key_are_spread() -> None:
    sticky = Sticky(0.25, "net@3")
    assert sum(sticky.takes(None) for _ in range(1000)) == pytest.approx(250, abs=3)
    assert sum(sticky.takes("") for _ in range(1000)) == pytest.approx(250, abs=3)


def test_the_same_keys_are_taken_in_another_process() -> None:
    code = (
        "from halfeven.serve.versions.traffic.split import Sticky; s = Sticky(0.1, 'net@3'); "
        "print([i for i in range(200) if s.takes(f'caller-{i}')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mine = Sticky(0.1, "net@3")
    assert done.stdout.strip() == str([i for i in range(200) if mine.takes(f"caller-{i}")])
