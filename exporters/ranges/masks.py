"""The numbers that take the place of a mask's sentinel (−1e9, −3.4e38), and when a softmax answers the same with them:
for programs and for files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOW, HIGH = -49152.0, -24576.0  # −1.5·2¹⁵ and −1.5·2¹⁴: exact in FP16 and bf16
# A comparison with a smaller number has the same result for the sentinel and for its replacement.
NEUTRAL = 1e3
MAX_SCORE = 16000.0  # LOW − score > −65504, LOW + score < HIGH, and HIGH + 110 < −score
SLACK = 2.0  # scores may become twice as large as the profile's


@dataclass(frozen=True, slots=True)
class Masked:
    """``exact``: masked elements are exactly ``value``. ``pure``: all elements are masked.
    ``twice``: some may hold the sum of two sentinels. ``bound``: magnitude of the others, and of what was added.
    ``floored``: masked elements have been lifted to a floor."""

    value: float
    exact: bool = True
    pure: bool = False
    twice: bool = False
    bound: float = 0.0
    floored: bool = False


class Unknown(Exception):
    """No rule covers this: the sentinel cannot be followed."""


def chosen(parts: Sequence[Masked | float], node: str) -> Masked:
    """Each element is one of these parts': of a mask, or an ordinary number with this bound. Raises Unknown."""
    masks = [part for part in parts if isinstance(part, Masked)]
    if len({mask.value for mask in masks}) > 1:
        raise Unknown(f"{node} mixes mask values {sorted({mask.value for mask in masks})}")
    mixed = len({mask.floored for mask in masks}) > 1
    return Masked(
        masks[0].value,
        exact=all(mask.exact for mask in masks) and not mixed,
        pure=all(isinstance(part, Masked) and part.pure for part in parts),
        twice=any(mask.twice for mask in masks),
        bound=max(part.bound if isinstance(part, Masked) else part for part in parts),
        floored=all(mask.floored for mask in masks),
    )


def softmax_doubt(state: Masked, bound: float, floor: bool, sink: str) -> str:
    """The reason why a softmax may answer otherwise after the rewriting; empty where it does not.

    ``bound``: of its other inputs beside the sentinel; ``floor``: True if a floor goes under the softmax.
    """
    if state.twice:
        return f"two masks are added together before {sink}"
    if bound > MAX_SCORE:
        return f"scores at {sink} may reach {bound:.3g}, expected at most {MAX_SCORE:g}"
    if (floor or state.floored) and not bound < ulp(state.value) / 2.0:
        return f"{state.value:.3g} does not absorb scores of {bound:.3g} at {sink}, even in FP32"
    return "" if witness(state.value, bound, floor) else f"the rewritten softmax at {sink} differs"


def ulp(value: float) -> float:
    """The distance of neighbouring FP32 numbers at a magnitude."""
    return 2.0 ** (math.frexp(value)[1] - 24)


def witness(value: float, bound: float, floor: bool) -> bool:
    """The claim in numbers: rows with no, one, some, all but one and all scores masked, before and after."""
    random = np.random.default_rng(0)
    scores = ((random.random((5, 64), np.float32) * 2 - 1) * np.float32(bound)).astype(np.float32)
    mask = random.random((5, 64)) < 0.5
    mask[0], mask[1], mask[2], mask[3, 1:], mask[4] = False, False, mask[2], True, True
    mask[1, 0], mask[3, 0] = True, False
    before, after = (
        np.where(mask, np.float32(masked), np.float32(0) if floor else scores) for masked in (value, LOW)
    )
    if floor:
        before, after = scores + before, np.maximum(scores + after, np.float32(HIGH))
    return np.array_equal(_softmax(before), _softmax(after))


def _softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a row of −∞ alone
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
