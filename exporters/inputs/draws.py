"""Seeded draws for evidence: the same on every machine, and those of torch's generator on a CPU (both are MT19937)."""

import numpy as np


def raw_draws(seed: int, *counts: int) -> list[np.ndarray]:
    """32 random bits for each element, in arrays of these sizes, one after the other."""
    seeded = np.random.RandomState(seed % (1 << 32))
    return [seeded.randint(0, 1 << 32, count, dtype=np.uint32) for count in counts]
