"""The gate for the answers of an engine that is not ours: a function that can be asked, or a file of answers.

Everything is as for our own forms: the version's original answers the same questions on a CPU, and `proof.prove.judged`
decides.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...models.errors import BadFolder, BadInput, BadSamples, EngineFailed, TooLarge
from ...models.spec.spec import ModelSpec
from ...models.store.store import Version
from ..gate.diagnosis import worst_sample
from ..gate.refusals import without_advice
from ..gate.verdict import AdversarialVerdict, OutputVerdict, ParityReport
from ..inputs.samples import Samples, read_tensors
from ..on_device.reprove import reference_run_of
from ..onnx.custom_nodes import fingerprints
from ..onnx.output_names import as_in_spec
from ..onnx.own_layout import batch_in_front
from ..onnx.reading.bounded_file import read_model
from ..onnx.runtime import has_half, loaded
from ..onnx.stored import half_storage
from ..proof.informative import why_nothing_is_proven
from ..proof.prove import ReferenceRun, judged, take
from ..proof.subject import CPU
from ..question import Answers, Arrays
from .file_rows import take_rows
from .onnx_pair import HALF

Judged = TypeVar("Judged", ParityReport, OutputVerdict, AdversarialVerdict)


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """``kind`` and ``where`` name it in the report. ``asked``: its answers, or those that it gave to the rows of
    ``inputs.npz`` (`exported/file_rows.py`). ``storage``: the same half with true half storage, judged as well where it
    is known: ONNX Runtime computes FP16 in FP32 on a CPU."""

    kind: str
    where: str
    asked: Answers | Arrays
    storage: Answers | None = None


def judge_engine(run: ReferenceRun, dtype: str, engine: OtherEngine) -> ParityReport:
    """The gate's report. ``dtype``: the half (``fp16``, ``bf16``) whose limits hold."""
    asked = engine.asked
    takes = [take(run, asked) if callable(asked) else take_rows(run, asked)]
    takes += [take(run, engine.storage)] if engine.storage else []
    return _said_of_engine(judged(run, dtype, takes))


def _said_of_engine(report: ParityReport) -> ParityReport:
    """The report with the same verdict, whose sentences give no advice: that is about halves that halfeven makes."""

    def said(one: Judged) -> Judged:
        return replace(one, failures=tuple(map(without_advice, one.failures)))

    report = replace(said(report), perturbed=report.perturbed and _said_of_engine(report.perturbed))
    outputs, adversarial = tuple(map(said, report.outputs)), tuple(map(said, report.adversarial))
    return replace(report, outputs=outputs, adversarial=adversarial)


def prove_engine(
    version: Version, samples: Samples, engine: OtherEngine, notify: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The facts of one proof, as `report.page.render_terminal` takes them: ``status`` is ``equal`` or ``refused``.

    Raises EngineFailed where the engine gives no answer, BadSamples for a file of answers with other rows and for
    samples whose answers in FP32 prove nothing.
    """
    dtype = version.manifest["half"] or version.read("precision.json", itemgetter("dtype"))
    notify(f"answering the samples of {version} in FP32")
    run = reference_run_of(version, dtype, CPU, samples)
    if nothing := why_nothing_is_proven(run):
        raise BadSamples(nothing)
    notify(f"judging the answers of the {engine.kind} {engine.where}")
    report = judge_engine(run, dtype, engine)
    found = report.to_json()
    judging, apart = samples.judging, 1 if samples.all_judge else 2
    worst = worst_sample(report, judging, {sample: apart * sample for sample in range(judging.count)})
    return {
        "model": version.name,
        "version": version.number,
        "digest": version.digest,
        "status": "equal" if report.passed else "refused",
        "half": dtype,
        "engine": {"kind": engine.kind, "where": engine.where, "asked": _asked(run, engine)},
        "samples": {"source": samples.source, "count": samples.count, "judging": report.samples},
        "worst": worst or None,
        **({"around": around} if (around := version.manifest.get("around")) else {}),
        "forms": {
            "engine": {key: found[key] for key in ("passed", "max_error_u", "sqnr_db")} | {"parity": found}
        },
    }


def _asked(run: ReferenceRun, engine: OtherEngine) -> dict[str, Any]:
    """The questions that the engine answered beyond the judging samples; of a file of answers no batch is known."""
    if not callable(engine.asked):
        return {"batch_sizes": None, "adversarial": 0}
    sizes = sorted({len(question.samples) for question in (*run.small, *run.bulk)})
    return {"batch_sizes": sizes, "adversarial": len(run.adversarial)}


def onnx_file(path: Path, spec: ModelSpec) -> OtherEngine:
    """An ONNX file in ONNX Runtime on a CPU, and with true half storage where it has nodes of half; its tensors are
    matched with those of the spec by name (`output_names`). Raises EngineFailed."""
    with batch_in_front(path, spec) as file:
        try:
            session = loaded(file)
        except Exception as error:  # ONNX Runtime has no narrower one
            raise EngineFailed(f"ONNX Runtime cannot load {path}: {str(error)[:800]}") from error
        model = read_model(file, file.parent)
    names = [output.name for output in session.get_outputs()]

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        try:
            outputs = session.run(names, {name: np.asarray(array) for name, array in arrays.items()})
        except Exception as error:
            raise EngineFailed(f"ONNX Runtime does not run {path}: {str(error)[:800]}") from error
        return dict(zip(names, map(np.asarray, outputs), strict=True))

    storage = half_storage(model, spec) if has_half(model) else None
    return OtherEngine("ONNX Runtime", str(path), as_in_spec(spec, answer), storage)


def check_custom_nodes(path: Path, version: Version) -> None:
    """Raises BadInput where the custom nodes of a file are not those of the proven half: nothing runs them here, so
    that no answer would show another one."""
    around = version.manifest.get("around")
    half = version.path(HALF)
    proven = fingerprints(read_model(half, half.parent)) if around else []
    try:
        found = fingerprints(read_model(path, path.parent))
    except (BadFolder, TooLarge):  # whoever runs the file says why it cannot be read
        return
    if found != proven:
        raise BadInput(
            f"{path} has nodes that ONNX Runtime does not know, and they are not those of {version}: expected "
            f"{', '.join(around['nodes']) if around else 'none'}, with the same attributes, constants and values"
        )


def answers_file(path: Path) -> OtherEngine:
    """A file of answers (npz or safetensors), one array for each output. Raises BadSamples."""
    return OtherEngine("file of answers", str(path), read_tensors(path))
