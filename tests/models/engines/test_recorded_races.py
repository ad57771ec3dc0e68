"""Recorded batches on their way together answer what each answers alone, whatever memory their graphs use again.

``HALFEVEN_RACES=10000 python -m pytest -s tests/models/engines/test_recorded_races.py`` asks so many batches in all and
prints how many of them were wrong.
"""

import os
import random

import numpy as np
import pytest

from tests.models.engines.recorded_runs import BATCHES, DEPTHS, IN_FLIGHT, SIZES, net, recorded_on, wrong_of
from tests.models.engines.simulated_runs import PACES
from tests.programs import Original
from tests.simulated_gpu import SimulatedGpu
from tests.slow import drawn

WANTED = int(os.environ.get("HALFEVEN_RACES", "0"))
TRIALS = max(1, -(-WANTED // (len(DEPTHS) * len(SIZES) * len(IN_FLIGHT) * BATCHES)))


def wrong(one: Original, sizes: tuple[int, ...], in_flight: int, seed: int) -> int:
    """The number of batches that are wrong in one trial on the simulated device."""
    with SimulatedGpu(random.Random(seed), PACES[seed % 3]) as gpu:
        there = recorded_on(gpu.device, one, sizes, in_flight)
        replays, found = gpu.replays, wrong_of(there, one, sizes, seed)
        assert gpu.replays - replays == BATCHES, "a batch was not replayed"
        return found


@pytest.mark.slow
@pytest.mark.parametrize("depth", [*drawn(2, DEPTHS[::2]), *drawn(2, DEPTHS[1::2])])
def test_recorded_batches_on_their_way_together_are_right(depth: int) -> None:
    found = []
    for seed in range(TRIALS):
        one = net(depth, seed % 4 if WANTED else (0 if depth % 2 else depth))
        found += [
            wrong(one, sizes, in_flight, 100 * depth + seed) for sizes in SIZES for in_flight in IN_FLIGHT
        ]
    print(f"depth {depth}: {sum(found)} of {len(found) * BATCHES} batches were wrong")
    assert np.sum(found) == 0
