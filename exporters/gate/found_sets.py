"""Sets of found things (boxes after a suppression) are compared as sets: the order in which they stand decides nothing.

Outputs of the kind ``detections`` belong together; the first axis after the batch counts the things. One has the
boxes (x1, y1, x2, y2 along the last axis), one a score for each and one, an integer, its class; or one output has six
columns or more: box, score, class. Each thing of the original is matched with the thing of the half that has its class
and overlaps it most, and the half's answers are put into the original's order: then the gate's other rules hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...models.spec.spec import DETECTIONS, UNIT_ROUNDOFF, ModelSpec
from . import refusals
from .rule_verdicts import Failure
from .trial import Trial

OVERLAP = 0.5  # intersection over union, from which two boxes are of one thing
_BOX = 4

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Things:
    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True, slots=True)
class _Match:
    """``partners``: of each thing of the original, -1 where there is none; ``free``: so many things of one side alone
    have a score that is a near tie with the least; ``lost``: the score of one that is none."""

    partners: np.ndarray
    free: int
    lost: float | None


def matched(spec: ModelSpec, dtype: str, trials: Sequence[Trial]) -> tuple[list[Trial], list[Failure]]:
    """The trials with the half's sets in the order of the original's, and why the sets are not the same."""
    names = [tensor.name for tensor in spec.outputs if tensor.kind == DETECTIONS]
    if not names:
        return list(trials), []
    aligned, things, free = list[Trial](), 0, 0
    failure: Failure | None = None
    allowed = spec.parity.max_error_u * UNIT_ROUNDOFF[dtype]
    for trial in trials:
        if not _has_things(trial, names):
            aligned.append(trial)
            continue
        candidate = {name: trial.reference[name].copy() for name in names}
        for sample, original, half, into in _rows(spec, trial, names, candidate):
            ours, theirs = _things(original), _things(half)
            if ours is None or theirs is None:
                shapes = {name: list((half if ours else original)[name].shape) for name in names}
                failure = failure or refusals.no_things(shapes)
                continue
            match = _match(ours, theirs, allowed)
            things, free = things + len(match.partners), free + match.free
            if match.lost is not None and failure is None:
                failure = refusals.other_things(names[0], sample, match.lost)
            there = match.partners >= 0
            for name in names:
                into[name][there] = half[name][match.partners[there]]
        aligned.append(replace(trial, candidate={**trial.candidate, **candidate}))
    most = max(1.0, spec.parity.max_flips * things)
    if failure is None and free > most:
        failure = refusals.many_near_ties(names[0], free, things, spec.parity.max_flips)
    return aligned, [failure] if failure else []


def _has_things(trial: Trial, names: Sequence[str]) -> bool:
    """False where the half gives no such outputs, which other rules refuse."""
    pairs = [(trial.reference.get(name), trial.candidate.get(name)) for name in names]
    return all(
        one is not None and other is not None and (one.ndim, one.dtype) == (other.ndim, other.dtype)
        for one, other in pairs
    )


def _rows(
    spec: ModelSpec, trial: Trial, names: Sequence[str], into: Arrays
) -> Iterator[tuple[int, Arrays, Arrays, Arrays]]:
    sides = (trial.reference, trial.candidate, into)
    for row, sample in enumerate(trial.samples):
        original, half, out = (
            {name: side[name][row] if spec.batched else side[name] for name in names} for side in sides
        )
        yield sample, original, half, out


def _things(arrays: Arrays) -> _Things | None:
    """None where the outputs hold no things in one of the two ways."""
    if any(one.ndim == 0 for one in arrays.values()) or len({len(one) for one in arrays.values()}) > 1:
        return None
    floats = [array for array in arrays.values() if array.dtype.kind == "f"]
    original = next((one for one in floats if one.ndim == 2 and one.shape[1] > _BOX + 1), None)
    if original is not None:
        return _Things(original[:, :_BOX], original[:, _BOX], original[:, _BOX + 1])
    boxes = next((one for one in floats if one.ndim == 2 and one.shape[1] == _BOX), None)
    scores = next((one for one in floats if one.size == len(one) and one.ndim <= 2), None)
    if boxes is None or scores is None:
        return None
    classes = next(
        (one for one in arrays.values() if one.dtype.kind in "iu" and one.size == len(one)),
        np.zeros(len(boxes)),
    )
    return _Things(boxes, scores.reshape(-1), classes.reshape(-1))


def _match(original: _Things, half: _Things, allowed: float) -> _Match:
    overlap = np.where(
        original.classes[:, None] == half.classes[None, :], _overlaps(original.boxes, half.boxes), 0.0
    )
    partners = np.full(len(original.scores), -1)
    for thing in np.argsort(-original.scores, kind="stable"):
        if overlap.shape[1] and overlap[thing].max() >= OVERLAP:
            partners[thing] = overlap[thing].argmax()
            overlap[:, partners[thing]] = 0.0
    tolerance = allowed * float(np.abs(original.scores).max(initial=0.0))
    alone = np.concatenate([original.scores[partners < 0], np.delete(half.scores, partners[partners >= 0])])
    alone = alone[~(alone <= tolerance)]  # the others are places that hold no thing
    least = float(original.scores.min(initial=np.inf)) if len(original.scores) else 0.0
    lost = alone[~(alone <= max(least, tolerance) + tolerance)]
    return _Match(partners, len(alone) - len(lost), float(lost[0]) if len(lost) else None)


def _overlaps(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of each with each; 1 of equal boxes, of which each may be empty."""
    one, other = ones[:, None].astype(np.float64), others[None].astype(np.float64)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    common = np.clip(sides, 0.0, None).prod(-1)
    areas = [np.abs(box[..., 2:] - box[..., :2]).prod(-1) for box in (one, other)]
    union = areas[0] + areas[1] - common
    return np.where((one == other).all(-1), 1.0, common / np.where(union > 0, union, 1.0))
