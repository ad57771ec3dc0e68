"""The forms of a version where one of them cannot be made."""

from dataclasses import replace
from pathlib import Path

import pytest
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.plan import planned_forms
from halfeven.exporters.plan.aims import RETREATS, SHARES
from halfeven.exporters.proof.prove import Answers, ReferenceRun, judged, take
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch import forms
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.errors import ExportFailed
from halfeven.models.folder.package import Precision
from halfeven.models.store.store import Store, Version

from tests.conversions import samples_of
from tests.corpus import captured


def published(dtype: str, folder: Path) -> Version:
    """A convolutional net on the road, both forms."""
    net, samples = captured("zoo digits"), samples_of("zoo digits", 32, seed=1)
    spec = replace(net.spec, name="digits")
    subject = Subject(net.program, spec, samples, Precision(dtype=dtype), ("torch", "onnx"), Path(), {})
    return travel(subject, ProgramForms(subject), Store(folder), lambda _: None)


@pytest.mark.slow
def test_the_floor_is_asked_once_for_all_forms_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    floors, asked = list[ParityReport](), planned_forms.floor_report

    def counted(run: ReferenceRun, dtype: str, floor: Answers) -> ParityReport:
        floors.append(asked(run, dtype, floor))
        return floors[-1]

    monkeypatch.setattr(planned_forms, "floor_report", counted)
    net, samples = captured("several outputs"), samples_of("several outputs", 32, seed=1)
    maker = ProgramForms(Subject(net.program, net.spec, samples, Precision(), ("torch",), Path(), {}))
    planning, judging = samples.split()
    run = maker.reference_run(judging)
    for plans, share in enumerate((SHARES[0], RETREATS[0]), 1):
        assert maker.plan(planning, share, lambda _: None)
        report = judged(run, "fp16", [take(run, maker.settled.half())])
        assert {one.message for _ in "ab" for one in maker.diagnosed(report, run).diagnoses}
        assert len(floors) == plans


@pytest.mark.slow
def test_the_fp32_file_stays_where_onnx_cannot_write_the_half(tmp_path: Path) -> None:
    version = published("bf16", tmp_path)  # ONNX Runtime has no bfloat16 convolution
    assert "bfloat16" in version.manifest["forms"]["onnx"]["error"]
    assert version.has("original.onnx") and "original.onnx" in version.manifest["files"]
    assert version.has("half.pt2") and not version.has("half.onnx")


@pytest.mark.slow
def test_a_file_that_is_not_the_program_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(reference_run: ReferenceRun, answers: Answers) -> None:
        raise ExportFailed("in FP32 the exported form already differs from the program")

    monkeypatch.setattr(forms, "check_original_form", differs)
    version = published("fp16", tmp_path)
    assert "already differs" in version.manifest["forms"]["onnx"]["error"]
    assert version.has("half.pt2") and not version.has("original.onnx") and not version.has("half.onnx")
