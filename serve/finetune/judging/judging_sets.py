"""The judging sets of a job: samples with targets that the parent was judged with, or a validation file of the job.

The held-out rows of the training file are like the rows that are learnt: they do not show what was forgotten.
They join the judging samples of the version that the job makes, so that the next job cannot undo this one unseen; as
many rows that were trained on join its planning samples, so that the half is planned for the new data too. Both within
a bound.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ....exporters.inputs.samples import TARGET, Samples, stored_samples
from ....models.spec.spec import ModelSpec, TensorSpec
from ....models.store.store import Version
from .judging_metrics import classifies, graded

LEAST_ROWS = 20  # of a set that judges
HELD_OUT, JUDGING = "held_out", "judging"
Sets = Mapping[str, Samples]
MOST_JOINED = 256  # held-out rows of one job
MOST_JUDGING = 2048  # judging samples in all: beyond it, older ones make room evenly


def sets_of(active: Version, held_out: Samples) -> dict[str, Samples]:
    """The sets that the active version and the new one are both scored on; the active one's samples only with
    targets."""
    _, judging = stored_samples(active).split()
    return {HELD_OUT: held_out} | ({JUDGING: judging} if judging.targets else {})


def judging_sets(sets: Sets, validated: bool) -> list[Samples]:
    """The sets that may judge: the held-out rows only where they are a validation file of the job."""
    return [samples for name, samples in sets.items() if name == JUDGING or validated]


def not_judged(spec: ModelSpec, learnt: Iterable[str], sets: Iterable[Samples]) -> str | None:
    """The reason why no set judges one of the ``learnt`` outputs, for the operator, or None where each is judged.

    A set whose targets are all equal judges nothing: one constant answer would be right; and neither do a few rows.
    """
    sets = list(sets)
    for name in learnt:
        tensor = next(tensor for tensor in spec.outputs if tensor.name == name)
        found = [samples.targets[name] for samples in sets if name in samples.targets]
        faults = [_fault(tensor, targets) for targets in found]
        if all(faults):
            came = faults[0] if faults else "no targets"
            return (
                f"nothing judges what was learnt for output '{name}': the samples that the model was converted with "
                f"and the job's validation file have {came} for it (held-out rows of the training file show "
                f"only what was trained on); convert the model with samples that have '{TARGET}{name}', or give "
                "the job a validation_file (--validation FILE)"
            )
    return None


def classes_not_judged(spec: ModelSpec, sets: Iterable[Samples]) -> str | None:
    """A sentence about an output of which the judging sets show some classes only; None where there is none."""
    sets = list(sets)
    for tensor in spec.outputs:
        classes = tensor.shape[-1] if tensor.shape else None
        if not classifies(tensor) or classes is None or not classes.fixed:
            continue
        shown = {int(one) for samples in sets for one in _graded(tensor, samples.targets.get(tensor.name))}
        if 1 < len(shown) < classes.minimum:
            return (
                f"the judging sets show {len(shown)} of the {classes.minimum} classes of output '{tensor.name}': what "
                "is forgotten about the others is not seen"
            )
    return None


def _fault(tensor: TensorSpec, targets: np.ndarray) -> str | None:
    """The reason why these targets cannot judge an output, or None where they can."""
    targets = targets[graded(tensor, targets)]
    if len(targets) < LEAST_ROWS:
        return f"targets in {len(targets)} rows only (at least {LEAST_ROWS} are needed)"
    rows = targets.reshape(len(targets), -1)
    differ = len(_graded(tensor, targets)) > 1 if classifies(tensor) else bool((rows != rows[:1]).any())
    return None if differ else "targets that are all alike"


def _graded(tensor: TensorSpec, targets: np.ndarray | None) -> np.ndarray:
    """The classes among the targets; a negative one is not graded."""
    return np.unique(targets[targets >= 0]) if targets is not None else np.array([], np.int64)


def evenly(samples: Samples, most: int) -> Samples:
    """Samples spread over all, at most ``most``."""
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
    return replace(_alternating(rows[0], rows[1], samples.source), drifted=samples.drifted)


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
