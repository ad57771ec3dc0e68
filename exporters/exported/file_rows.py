"""The questions of a proof as rows of one file, for an engine that is not asked itself: its answers come as a file too.

The rows are the judging samples in their order, then the perturbed samples. Batch sizes and adversarial inputs, whose
shapes differ, are left out.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...models.errors import BadSamples, ExportFailed
from ...models.spec.spec import ModelSpec
from ..gate.trial import Trial
from ..proof.prove import ReferenceRun, Taken, tried
from ..question import Arrays, Question

INPUTS, EXPECTED = "inputs.npz", "expected.npz"


def write_rows(run: ReferenceRun, folder: Path) -> None:
    """Write ``inputs.npz`` and ``expected.npz``: one array for each input and each output of the original, axis 0 the
    rows (of a model that is not batched the rows are in front). Raises ExportFailed where answers differ in shape."""
    questions = [*_once(run.spec, run.bulk), *_once(run.spec, run.perturbed)]
    try:
        inputs = _joined(run.spec, [question.inputs for question in questions])
        expected = _joined(run.spec, [question.reference for question in questions])
    except ValueError as error:
        raise ExportFailed(
            f"the answers of '{run.spec.name}' differ in shape from sample to sample, so that they are not rows of one "
            f"file: {error}; ask a running engine instead (halfeven prove --against URL or FILE.onnx)"
        ) from error
    write_npz(folder / INPUTS, inputs)
    write_npz(folder / EXPECTED, expected)


def take_rows(run: ReferenceRun, answers: Arrays) -> Taken:
    """The rows of a file of answers beside the original's. Raises BadSamples where an output has not as many."""
    judging, perturbed = (_once(run.spec, questions) for questions in (run.bulk, run.perturbed))
    wanted = sum(len(question.samples) for question in (*judging, *perturbed))
    for name, array in answers.items():
        if array.ndim == 0 or len(array) != wanted:
            came = "no rows" if array.ndim == 0 else f"{len(array)} rows"
            raise BadSamples(
                f"output '{name}': expected {wanted} rows, one for each row of {INPUTS} in its order, got {came}"
            )
    trials, start = list[Trial](), 0
    for question in (*judging, *perturbed):
        rows = slice(start, start + len(question.samples)) if run.spec.batched else start
        candidate = {name: np.asarray(array[rows]) for name, array in answers.items()}
        trials.append(
            tried(question.samples, question.inputs, question.reference, candidate, run.tie_tolerance)
        )
        start += len(question.samples)
    return trials[: len(judging)], [], trials[len(judging) :]


def _once(spec: ModelSpec, questions: Iterable[Question]) -> list[Question]:
    """Every sample once: the last batch of a proof is filled up with samples that were asked before."""
    seen, found = set[int](), list[Question]()
    for question in questions:
        fresh = [sample for sample in dict.fromkeys(question.samples) if sample not in seen]
        seen.update(fresh)
        found.append(question.first(len(fresh)) if spec.batched else question)
    return found


def _joined(spec: ModelSpec, parts: Sequence[Arrays]) -> dict[str, np.ndarray]:
    join = np.concatenate if spec.batched else np.stack
    return {name: join([part[name] for part in parts]) for name in parts[0]}


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the file as ``numpy.savez`` does, which cannot write an array named ``file``."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
