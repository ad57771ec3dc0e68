"""The original evaluated another way, one row at a time or in FP64, passes the gate that its halves are held to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.forms import FileForms, foreign_subject
from halfeven.exporters.onnx.precision.oracle import Oracle
from halfeven.exporters.proof.prove import ReferenceRun, judged, one_at_a_time, take
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.question import Answers
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.exporters.torch.program_graph import exact_answers
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.errors import CannotConvert
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.conversions import samples_of
from tests.corpus import CORPUS, captured, cases
from tests.programs import original

every_model = pytest.mark.parametrize("name", cases(CORPUS))


def refused(reference_run: ReferenceRun, *ways: Answers) -> list[str]:
    reports = [judged(reference_run, "fp16", [take(reference_run, way)]) for way in ways]
    return [report.summary() for report in reports if not report.passed]


@every_model
def test_a_program_in_fp64_and_one_row_at_a_time_is_never_refused(name: str) -> None:
    use_true_fp32()
    model, samples = captured(name), samples_of(name, 32, seed=4)
    maker = ProgramForms(Subject(model.program, model.spec, samples, Precision(), ("torch",), Path(), {}))
    reference_run = maker.reference_run(samples)
    exact = exact_answers(runnable(model.program), model.spec)
    alone = one_at_a_time(maker.original()) if model.spec.batched else maker.original()
    assert refused(reference_run, exact, alone) == []


@pytest.mark.parametrize("name", cases(CORPUS, {"lstm", "masked pooling", "sigmoid tail"}))
def test_a_file_node_by_node_and_one_row_at_a_time_is_never_refused(name: str, tmp_path: Path) -> None:
    model, samples = captured(name), samples_of(name, 32, seed=4)
    try:
        write_onnx(model.program, model.spec, tmp_path / "original.onnx", {})
    except CannotConvert as error:
        pytest.skip(f"it does not export: {error}")
    asked = ModelFolder(tmp_path, "original.onnx", (), None, None, model.spec, Precision())
    subject, maker = foreign_subject(asked, samples, {}, False, lambda _: None)
    assert isinstance(maker, FileForms)
    reference_run = maker.reference_run(samples)
    node_by_node = Oracle(maker.program.model, maker.program.weights).run
    alone = one_at_a_time(maker.original()) if subject.spec.batched else maker.original()
    assert refused(reference_run, node_by_node, alone) == []


class NearlyEmpty(nn.Module):
    """A map of scores of which one row is what is left of two large terms: FP32 has hardly three digits of it."""

    def forward(self, x: Tensor) -> Tensor:
        left = (1e4 * x + 5e-3 * torch.tanh(x)) - 1e4 * x
        return torch.stack([torch.tanh(x), left, torch.sin(x)], 1)


def test_a_row_that_fp32_hardly_has_is_no_reason_to_refuse_fp32() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(32, 24)
    model, samples = original(NearlyEmpty(), {"x": inputs}), Samples({"x": inputs.numpy()})
    maker = ProgramForms(Subject(model.program, model.spec, samples, Precision(), ("torch",), Path(), {}))
    reference_run = maker.reference_run(samples)
    exact = exact_answers(runnable(model.program), model.spec)
    assert refused(reference_run, exact) == []
    (reason,) = refused(replace(reference_run, noise={}), exact)
    assert "slice 1 along axis 1" in reason
