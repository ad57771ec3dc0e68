"""Looks at a store with many models take a small share of a core, and still come every few seconds."""

import pytest
from halfeven.serve.versions.pace import LONGEST_PAUSE_S, LOOK_EVERY_S, SHARE, LookingPace


@pytest.mark.parametrize(
    ("spent_s", "pause_s"),
    [
        ([0.001, 0.001], LOOK_EVERY_S),
        ([0.02, 0.02], 0.02 / SHARE),  # some hundred models
        ([0.001, 60.0], LOOK_EVERY_S),  # a version was made ready
        ([9.0, 9.0], LONGEST_PAUSE_S),
    ],
)
def test_the_pause_follows_what_looks_cost(spent_s: list[float], pause_s: float) -> None:
    now_s, looked = 0.0, 0

    def look() -> None:
        nonlocal now_s, looked
        now_s += spent_s[looked]
        looked += 1

    pace = LookingPace(lambda: now_s)
    pace.pause_after(look)
    assert pace.pause_after(look) == pytest.approx(pause_s) and looked == 2
