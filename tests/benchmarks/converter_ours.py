"""Our own roads to a half ONNX file behind the door that the peers have (`converter_peers.serve`).

    python -m tests.benchmarks.converter_ours NAME

"file" starts from the same ONNX file as the peers, "program" from the captured program it was written from.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from halfeven.exporters.captured import Captured
from halfeven.exporters.foreign.conversion import (
    convert_onnx,
    half_answers,
    oracle_answers,
    whole_answers,
)
from halfeven.exporters.maker import SHARES
from halfeven.exporters.onnx import write_onnx
from halfeven.exporters.prove import judged, set_exam, take
from halfeven.exporters.samples import Samples
from halfeven.exporters.subject import Subject
from halfeven.models.engines.torch_engine import use_true_fp32
from halfeven.models.errors import CannotConvert
from halfeven.models.package import ModelFolder, Precision
from halfeven.models.version import VERSION

from tests.benchmarks.converter_peers import Job, Loaded, serve
from tests.corpus import captured


def samples_of(job: Job) -> Samples:
    """The calibration batches one after the other: what a model folder would have as its samples."""
    batches = [dict(np.load(path)) for path in sorted(Path(job["calibration"]).iterdir())]
    if captured(job["name"]).spec.batched:
        return Samples({key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]})
    return Samples({key: np.stack([batch[key] for batch in batches]) for key in batches[0]})


@dataclass(frozen=True, slots=True)
class FromFile:
    """The foreign road: planned on half of the samples, proven on the others."""

    precision: Precision

    def __call__(self, job: Job) -> None:
        source, spec = Path(job["source"]), captured(job["name"]).spec
        planning, judging = samples_of(job).split()
        folder = ModelFolder(source.parent, source.name, (), None, None, spec, self.precision)
        made = convert_onnx(source, folder, planning, self.precision)
        half = made.half
        if half is not None:
            exam = set_exam(made.spec, judging, whole_answers(made))
            _refuse_unless(
                judged(exam, "fp16", [take(exam, oracle_answers(made)), take(exam, half_answers(made))])
            )
        onnx.save(made.whole if half is None else half, job["target"])


@dataclass(frozen=True, slots=True)
class FromProgram:
    """The captured road, as `road.travel` goes it: planned, proven, and planned more strictly once."""

    precision: Precision

    def __call__(self, job: Job) -> None:
        whole, samples = captured(job["name"]), samples_of(job)
        subject = Subject(
            whole.program, whole.spec, samples, self.precision, ("onnx",), Path(), {}, search=True
        )
        maker = Captured(subject)
        planning, judging = samples.split()
        exam, report = set_exam(whole.spec, judging, maker.whole()), None
        for share in SHARES:
            if not maker.plan(planning, share, lambda _: None):
                break
            report = judged(exam, "fp16", [take(exam, *maker._taken())])
            if report.passed:
                break
        _refuse_unless(report)
        program = maker.half.program if maker.half.half_nodes else whole.program
        write_onnx(program, whole.spec, Path(job["target"]), {})


def _refuse_unless(report) -> None:  # type: ignore[no-untyped-def]
    if report is None or not report.passed:
        raise CannotConvert(f"refused: {report and report.summary()}")


OURS = {
    "halfeven, file": lambda: (FromFile(Precision("O1")), f"halfeven {VERSION}"),
    "halfeven, file, O3": lambda: (FromFile(Precision("O3")), f"halfeven {VERSION}"),
    "halfeven, program": lambda: (FromProgram(Precision("O1")), f"halfeven {VERSION}"),
    "halfeven, program, O3": lambda: (FromProgram(Precision("O3")), f"halfeven {VERSION}"),
}


def _loaded() -> Loaded:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    use_true_fp32()
    return OURS[sys.argv[1]]()


if __name__ == "__main__":
    serve(_loaded)
