"""Answers of a device compared with those of the FP32 program on a CPU."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...models.engines.engine import Engine, Launched
from .nets import Parts

FP32_GAP = 1e-3  # of the largest magnitude: sums in another order are far below, rubbish is far above
HALF_GAP = 2**-7  # 16 times half's unit roundoff


def answers_in_flight(engine: Engine, batches: Sequence[Parts]) -> list[list[np.ndarray]]:
    """The outputs of each batch, as many under way as the engine takes ahead. All are taken before one is looked at."""
    flying: deque[Launched] = deque()
    taken: list[list[np.ndarray]] = []
    try:
        for parts in batches:
            flying.append(engine.launch(parts))
            if len(flying) == engine.in_flight:
                taken.append(flying.popleft().wait())
        while flying:
            taken.append(flying.popleft().wait())
    finally:
        for launched in flying:
            launched.wait()
    return taken


def gap(came: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference as a part of that output's largest magnitude; infinity where it is none."""
    if len(came) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(came, expected, strict=True):
        if one.shape != other.shape or not np.isfinite(one).all():
            return float("inf")
        largest = float(np.abs(other).max(initial=0.0)) or 1.0
        worst = max(worst, float(np.abs(one.astype(np.float64) - other).max(initial=0.0)) / largest)
    return worst


def wrong_batches(
    net: str, came: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]], most: float
) -> list[str]:
    """A sentence about the batches whose answers differ by more than ``most``; none where all are right."""
    gaps = [gap(one, other) for one, other in zip(came, expected, strict=True)]
    wrong = [number for number, found in enumerate(gaps) if not found <= most]
    if not wrong:
        return []
    return [
        f"{net}: {len(wrong)} of {len(gaps)} batches differ from the FP32 program by more than {most:.3g} of the "
        f"largest number; batch {wrong[0]} by {gaps[wrong[0]]:.3g}"
    ]
