"""Our own two roads to a half ONNX file behind the door that the peers have (`converter_peers.serve`).

    python -m tests.benchmarks.converter_ours NAME

"file" starts from the same ONNX file as the peers, "program" from the captured program it was written from.
Both go the whole road, proof and report included; a refusal is a converter's error. "O3" asks for half
everywhere and for a search of what must not be, which is what the peers attempt.
"""

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.forms import foreign_subject
from halfeven.exporters.proof.maker import Maker
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.report.version_facts import facts_of
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.errors import CannotConvert
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.store.store import Store
from halfeven.models.version import __version__

from tests.benchmarks.converter_peers import Job, Loaded, serve
from tests.corpus import captured

Start = Callable[[Job, Samples, Precision], tuple[Subject, Maker]]


def from_file(job: Job, samples: Samples, precision: Precision) -> tuple[Subject, Maker]:
    source, spec = Path(job["source"]), replace(captured(job["name"]).spec, name="model")
    folder = ModelFolder(source.parent, source.name, (), None, None, spec, precision)
    return foreign_subject(folder, samples, {}, True, lambda _: None)


def from_program(job: Job, samples: Samples, precision: Precision) -> tuple[Subject, Maker]:
    original, folder = captured(job["name"]), Path(job["source"]).parent
    spec = replace(original.spec, name="model")  # not every name here is one that a store takes
    subject = Subject(original.program, spec, samples, precision, ("onnx",), folder, {}, search=True)
    return subject, ProgramForms(subject)


@dataclass(frozen=True, slots=True)
class Road:
    start: Start
    precision: Precision

    def __call__(self, job: Job) -> None:
        with tempfile.TemporaryDirectory() as folder:
            subject, maker = self.start(job, samples_of(job), self.precision)
            version = travel(subject, maker, Store(Path(folder)), lambda _: None)
            form = facts_of(version)["forms"]["onnx"]
            if not form["passed"]:
                raise CannotConvert(f"refused: {version.json('parity.json')['forms'].get('onnx', form)}")
            half = version.folder / "half.onnx"
            shutil.copy(half if half.exists() else version.folder / "original.onnx", job["target"])


def samples_of(job: Job) -> Samples:
    """The calibration batches one after the other: what a model folder would have as its samples."""
    batches = [dict(np.load(path)) for path in sorted(Path(job["calibration"]).iterdir())]
    joined = np.concatenate if captured(job["name"]).spec.batched else np.stack
    return Samples({key: joined([batch[key] for batch in batches]) for key in batches[0]})


OURS: dict[str, Road] = {
    "halfeven, file": Road(from_file, Precision("O1")),
    "halfeven, file, O3": Road(from_file, Precision("O3")),
    "halfeven, program": Road(from_program, Precision("O1")),
    "halfeven, program, O3": Road(from_program, Precision("O3")),
}


def _loaded() -> Loaded:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return OURS[sys.argv[1]], f"halfeven {__version__}"


if __name__ == "__main__":
    serve(_loaded, prepare=lambda job: captured(job["name"]))
