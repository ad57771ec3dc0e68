"""Makes the samples of a fine-tuned version: the samples of the active version, and rows of the job that trained it.

Held-out rows join the judging samples, so that the next job cannot undo this one unseen; as many rows that were
trained on join the planning samples, so that the half is planned for the new data too. Both within a bound.
"""

from collections.abc import Sequence

import numpy as np

from ....exporters.inputs.samples import Samples
from ....models.spec.spec import ModelSpec
from .judging_metrics import classifies

MOST_JOINED = 256  # held-out rows of one job
MOST_JUDGING = 2048  # judging samples in all: beyond it, older ones make room evenly


def evenly(samples: Samples, most: int) -> Samples:
    """At most ``most`` samples, spread over all."""
    if samples.count <= most:
        return samples
    return samples.take(np.linspace(0, samples.count - 1, most).round().astype(np.int64))


def with_joined(spec: ModelSpec, samples: Samples, seen: Samples, held_out: Samples) -> Samples | None:
    """``samples`` with rows of a job; None where these have other lengths and one tensor cannot hold both.

    An output that has targets on one side only is not graded on the other: its class is −1 there, its value NaN.
    """
    count = min(MOST_JOINED, seen.count, held_out.count)
    planning, judging = samples.split()
    room = max(MOST_JUDGING, judging.count) - count
    parts = [
        (evenly(judging, room), evenly(held_out, count)),
        (evenly(planning, room), evenly(seen, count)),
    ]
    rows = [_concatenated(spec, pair) for pair in parts]
    if rows[0] is None or rows[1] is None:
        return None
    return _alternating(rows[0], rows[1], samples.source)


def _concatenated(spec: ModelSpec, parts: Sequence[Samples]) -> Samples | None:
    try:
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
        targets = {
            tensor.name: np.concatenate(_graded_alike(classifies(tensor), tensor.name, parts))
            for tensor in spec.outputs
            if any(tensor.name in part.targets for part in parts)
        }
    except ValueError:
        return None
    return Samples(arrays, targets)


def _graded_alike(classes: bool, name: str, parts: Sequence[Samples]) -> list[np.ndarray]:
    known = next(part.targets[name] for part in parts if name in part.targets)
    none = np.full(known.shape[1:], -1 if classes else np.nan)
    found = [part.targets.get(name, np.broadcast_to(none, (part.count, *none.shape))) for part in parts]
    return [array.astype(np.int64 if classes else known.dtype) for array in found]


def _alternating(judging: Samples, planning: Samples, source: str) -> Samples:
    """Judging and planning samples in turn, a judging sample first: `Samples.split` divides them in the same way."""

    def woven(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        whole = np.empty((len(first) + len(second), *first.shape[1:]), first.dtype)
        whole[0::2], whole[1::2] = first, second
        return whole

    return Samples(
        {name: woven(array, planning.arrays[name]) for name, array in judging.arrays.items()},
        {name: woven(array, planning.targets[name]) for name, array in judging.targets.items()},
        source,
    )
