"""The corpus converted in this process: plan, half program and verdicts, each made once."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.forms import foreign_subject
from halfeven.exporters.plan.aims import SHARES
from halfeven.exporters.plan.counterexamples import excess
from halfeven.exporters.proof.maker import Maker
from halfeven.exporters.proof.prove import ReferenceRun, judged, take, tried
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.exporters.torch.program_answers import ties_of
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.program import runnable

from tests.corpus import captured, fresh
from tests.few_unseen import unseen_samples
from tests.programs import Original

MAX_KEPT = 10
DRAWS, DRAWN = 16, 32  # rows of a draw: as many as a folder without samples is planned and judged on


@dataclass(frozen=True)
class Converted:
    """``report``: the gate on the judging samples; ``fresh``: the faithful check on inputs nobody has seen."""

    maker: ProgramForms
    report: ParityReport | None
    fresh: ParityReport | None

    @property
    def kept(self) -> list[str]:
        return [kept["node"] for kept in self.maker.facts()["kept"]]

    @property
    def passed(self) -> bool:
        return self.report is None or self.report.passed

    def judged(self, samples: Samples) -> ParityReport | None:
        return _report(self.maker, self.maker.reference_run(samples))


def samples_of(name: str, rows: int, seed: int) -> Samples:
    return Samples({key: tensor.numpy() for key, tensor in fresh(name, rows, seed).items()})


def as_subject(model: Original, samples: Samples, level: str = "O1") -> Subject:
    """The subject of a conversion to the torch form alone."""
    return Subject(model.program, model.spec, samples, Precision(level), ("torch",), Path(), {})


def as_file(subject: Subject, folder: Path, search: bool = False) -> tuple[Subject, Maker]:
    """The subject's model as an ONNX file."""
    write_onnx(subject.exported, subject.spec, folder / "original.onnx", {})
    asked = ModelFolder(folder, "original.onnx", (), None, None, subject.spec, subject.precision)
    return foreign_subject(asked, subject.samples, {}, search, lambda _: None)


@cache
def converted(name: str, level: str = "O1") -> Converted:
    """The conversion of a model up to the verdict on the torch form, as `road.travel` does it; nothing is written."""
    use_true_fp32()
    model, samples = captured(name), samples_of(name, 32, seed=1)
    maker = ProgramForms(as_subject(model, samples, level))
    planning, judging = samples.split()
    reference_run = maker.reference_run(judging)
    report = None
    with unseen_samples(few=False):  # whichever test asks first
        for share in SHARES:
            if not maker.plan(planning, share, lambda _: None):
                continue
            report = _report(maker, reference_run)
            if report is None or report.passed:
                break
    unseen = maker.reference_run(samples_of(name, 16, seed=2))
    return Converted(maker, report, _report(maker, unseen))


def refused_on_unseen(name: str) -> list[str]:
    """The findings of the faithful check alone against the half, on many fresh inputs.

    They are judged together, and then every draw by itself: an error counts against the largest answer of its draw,
    which may be small. What is a share of all decisions or of all the signal counts over all draws.
    """
    maker, rows = converted(name).maker, captured(name).spec.max_batch_size
    if not maker.half.half_nodes:
        return []
    spec, samples = maker.subject.spec, samples_of(name, DRAWS * DRAWN, seed=3)
    original, half = maker.original(), maker.settled.half()
    tie_tolerance = ties_of(runnable(maker.subject.exported), spec, "fp16", samples)
    trials = [
        tried(numbers, inputs, original(inputs), half(inputs), tie_tolerance)
        for numbers, inputs in samples.batches(rows)
    ]
    each = DRAWN // rows
    draws = [judge(spec, "fp16", trials[start : start + each]) for start in range(0, len(trials), each)]
    together = judge(spec, "fp16", trials)
    refused = [*([] if together.passed else [together]), *(draw for draw in draws if not excess(draw) <= 1)]
    return [report.summary() for report in refused]


def _report(maker: ProgramForms, reference_run: ReferenceRun) -> ParityReport | None:
    """The report on true half kernels and on the emulation; None where nothing is half."""
    if not maker.half.half_nodes:
        return None
    storage, emulation = maker.storage(), maker.settled.half()
    return judged(reference_run, "fp16", [take(reference_run, storage), take(reference_run, emulation)])
