"""The judging sets of a job: samples with targets that the parent was judged with, or a validation file of the job.

The held-out rows of the training file are like the rows that are learnt: they do not show what was forgotten.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from ....exporters.inputs.samples import TARGET, Samples, stored_samples
from ....models.spec.spec import ModelSpec, TensorSpec
from ....models.store.store import Version
from .judging_metrics import classifies, graded

LEAST_ROWS = 20  # of a set that judges
HELD_OUT, JUDGING = "held_out", "judging"
Sets = Mapping[str, Samples]


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
