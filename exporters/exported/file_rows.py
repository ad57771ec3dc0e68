"""The questions of a proof as rows of one file, for an engine that is not asked itself: its answers come as a file too.

The rows are the judging samples in their order, then the perturbed samples. Batch sizes and adversarial inputs, whose
shapes differ, are left out. An output is one array whose axis 0 is the rows; where the answers of one differ in shape
from row to row, it has an array for each row: ``y[0]``, ``y[1]``, ….
"""

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...models.errors import BadInput, BadSamples
from ...models.spec.spec import ModelSpec
from ..gate.trial import Trial
from ..proof.prove import ReferenceRun, Taken, tried
from ..question import Arrays, Question

INPUTS, EXPECTED = "inputs.npz", "expected.npz"
_Rows: TypeAlias = Mapping[str, np.ndarray] | Mapping[str, list[np.ndarray]]
_EACH = re.compile(r"\[\d+\]$")


def write_rows(run: ReferenceRun, folder: Path) -> None:
    """Write ``inputs.npz`` and ``expected.npz`` (of a model that is not batched the rows are in front)."""
    questions = [*_once(run.spec, run.bulk), *_once(run.spec, run.perturbed)]
    write_npz(folder / INPUTS, _as_file(run.spec, [question.inputs for question in questions]))
    write_npz(folder / EXPECTED, _as_file(run.spec, [question.reference for question in questions]))


def answers_differ_in_shape(folder: Path) -> bool:
    """True if ``expected.npz`` has an output with an array for each row."""
    with zipfile.ZipFile(folder / EXPECTED) as file:
        return any(name.endswith("[0].npy") for name in file.namelist())


def take_rows(run: ReferenceRun, answers: _Rows) -> Taken:
    """The rows of a file of answers beside the original's; an output may also be the list of its rows. Raises
    BadSamples where an output has not as many."""
    judging, perturbed = (_once(run.spec, questions) for questions in (run.bulk, run.perturbed))
    wanted = sum(len(question.samples) for question in (*judging, *perturbed))
    outputs = _outputs(run.spec, answers, wanted)
    join = np.stack if run.spec.batched else itemgetter(0)
    trials, start = list[Trial](), 0
    for question in (*judging, *perturbed):
        rows = slice(start, start + len(question.samples))
        candidate = {name: np.asarray(join(array[rows])) for name, array in outputs.items()}
        trials.append(
            tried(question.samples, question.inputs, question.reference, candidate, run.tie_tolerance)
        )
        start += len(question.samples)
    return trials[: len(judging)], [], trials[len(judging) :]


def _outputs(spec: ModelSpec, answers: _Rows, wanted: int) -> dict[str, list[np.ndarray]]:
    """The answers to ``wanted`` rows by output."""
    own, found = {tensor.name for tensor in spec.outputs}, dict[str, list[np.ndarray]]()
    for name, array in answers.items():
        if name in own or not _EACH.search(name):
            found[name] = list(array) if isinstance(array, list) or array.ndim else []
        elif name.endswith("[0]"):
            output = name.removesuffix("[0]")
            each = map(answers.get, _each(output, wanted))
            found[output] = [row for row in each if isinstance(row, np.ndarray)]
    for output, rows in found.items():
        if len(rows) != wanted:
            raise BadSamples(
                f"output '{output}': expected {wanted} rows, one for each row of {INPUTS} in its order, got "
                f"{len(rows) or 'no'} rows"
            )
    return found


def _once(spec: ModelSpec, questions: Iterable[Question]) -> list[Question]:
    """Every sample once: the last batch of a proof is filled up with samples that were asked before."""
    seen, found = set[int](), list[Question]()
    for question in questions:
        fresh = [sample for sample in dict.fromkeys(question.samples) if sample not in seen]
        seen.update(fresh)
        found.append(question.first(len(fresh)) if spec.batched else question)
    return found


def _as_file(spec: ModelSpec, parts: Sequence[Arrays]) -> dict[str, np.ndarray]:
    found = dict[str, np.ndarray]()
    for name in parts[0]:
        rows = [row for part in parts for row in (part[name] if spec.batched else [part[name]])]
        if len({row.shape for row in rows}) == 1:
            found[name] = np.stack(rows)
        elif taken := [each for each in _each(name, len(rows)) if each in parts[0]]:
            raise BadInput(
                f"{taken[0]!r} is the name of a tensor, and of a row of {name!r}, whose rows differ in shape: expected "
                "different names in the file of rows; rename one of the two"
            )
        else:
            found |= zip(_each(name, len(rows)), rows, strict=True)
    return found


def _each(output: str, rows: int) -> Iterator[str]:
    return (f"{output}[{row}]" for row in range(rows))


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the file as ``numpy.savez`` does, which cannot write an array named ``file``, without the time: equal
    arrays make equal bytes, which a half has the digest of."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                # `ascontiguousarray` would give a scalar an axis.
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
