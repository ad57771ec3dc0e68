"""Findings about training data that fit the model but look wrong: sentences recorded when a job is admitted."""

from collections import defaultdict

import numpy as np

from ....exporters.inputs.samples import Samples, stored_samples
from ....models.spec.spec import ModelSpec, TensorSpec
from ....models.store.store import Version
from ..judging.judging_metrics import classifies
from .datasets import TrainingData, row_digests, with_classes

SCALED = 30.0  # times as large or as small as the parent's samples
_NAMED = 10


def findings_of(parent: Version, data: TrainingData, train: np.ndarray) -> list[str]:
    """``train``: the numbers of the rows that are trained on."""
    spec = parent.spec()
    targets = with_classes(spec, data.samples).targets
    found = [missing_classes(tensor, targets[tensor.name][train]) for tensor in spec.outputs
             if tensor.name in data.losses]  # fmt: skip
    if parent.manifest.get("samples", {}).get("source") == "given":
        known = stored_samples(parent)
        found += [*scaled_inputs(spec, data.samples, known), trained_judges(known.split()[1], data, train)]
    return [sentence for sentence in [left_out(data), *found, repeated(data)] if sentence]


def left_out(data: TrainingData) -> str:
    """The rows that are quarantined, with the fault of each."""
    rows = data.quarantined
    named = "; ".join(f"row {row}: {fault}" for row, fault in list(rows.items())[:_NAMED])
    more = f"; … ({len(rows)} rows)" if len(rows) > _NAMED else ""
    return f"rows that cannot be learnt from are left out: {named}{more}" if rows else ""


def missing_classes(tensor: TensorSpec, targets: np.ndarray) -> str:
    """The classes of the model that no row to train on has."""
    classes = tensor.shape[-1] if tensor.shape else None
    if not classifies(tensor) or classes is None or not classes.fixed:
        return ""
    missing = sorted(set(range(classes.minimum)) - set(np.unique(targets).tolist()))
    if not missing:
        return ""
    named = ", ".join(_class(tensor, one) for one in missing[:_NAMED]) + (", …" if missing[_NAMED:] else "")
    return (
        f"the rows to train on lack {len(missing)} of the {classes.minimum} classes of output '{tensor.name}': {named}"
        "; the model may forget them: add rows of these classes, for example from the data that it was trained on"
    )


def scaled_inputs(spec: ModelSpec, data: Samples, known: Samples) -> list[str]:
    """The inputs whose values are of another size than those of the parent's samples."""
    found = []
    for tensor in spec.inputs:
        if not tensor.type.is_float:
            continue
        new, old = (_size(samples.arrays[tensor.name]) for samples in (data, known))
        if old and new and not 1 / SCALED < new / old < SCALED:
            times = (
                f"{new / old:,.3g} times as large as" if new > old else f"{old / new:,.3g} times smaller than"
            )
            found.append(
                f"input '{tensor.name}' is {times} in the model's samples (root mean square {new:.3g}, in the samples "
                f"{old:.3g}): were the rows scaled as those that the model was trained on?"
            )
    return found


def trained_judges(judging: Samples, data: TrainingData, train: np.ndarray) -> str:
    """Judging samples that are trained on too: they do not show what is forgotten."""
    digests = data.row_digests()
    trained = {digests[row] for row in train}
    both = sum(digest in trained for digest in row_digests(judging)) if judging.targets else 0
    return (
        f"{both} of the {judging.count} judging samples of the model are among the rows to train on: they do not show "
        "what is forgotten"
        if both
        else ""
    )


def repeated(data: TrainingData) -> str:
    """The rows that occur more than once, and which of these have different targets."""
    rows: dict[bytes, list[int]] = defaultdict(list)
    for row, digest in enumerate(data.row_digests()):
        rows[digest].append(row)
    twins = [places for places in rows.values() if len(places) > 1]
    if not twins:
        return ""
    further = sum(len(places) - 1 for places in twins)
    differing = [pair for places in twins if (pair := _contradicting(data, places))]
    contradict = (
        f"; the targets of {len(differing)} of them contradict each other, for example in rows "
        f"{_rows(data, differing[0])}"
        if differing
        else ""
    )
    example = _rows(data, twins[0])
    return f"{further} rows have the same inputs as an earlier row, for example rows {example}{contradict}"


def _contradicting(data: TrainingData, places: list[int]) -> list[int]:
    """The first of these rows, and the first whose targets are others; empty where they are all the same."""
    first, *others = places
    for place in others:
        for target in data.samples.targets.values():
            if not np.array_equal(target[place], target[first], equal_nan=target.dtype.kind == "f"):
                return [first, place]
    return []


def _class(tensor: TensorSpec, number: int) -> str:
    label = tensor.labels[number] if number < len(tensor.labels) else str(number)
    return str(number) if label == str(number) else f"{number} ('{label}')"


def _size(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0


def _rows(data: TrainingData, places: list[int]) -> str:
    return " and ".join(map(str, data.numbers[places[:2]]))
