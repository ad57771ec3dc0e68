"""Engines that are not ours and are wrong are caught by the gate; the same engines without their fault pass."""

from functools import cache
from pathlib import Path

import pytest
from halfeven.exporters.exported.other_engine import OtherEngine, judge_engine
from halfeven.exporters.proof.prove import ReferenceRun
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.question import Answers
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.models.folder.package import Precision

from tests.exporters.sabotaged_engines import AROUND, IN_PARTS, engine_of, model_of, module_of


@cache
def run_of(name: str) -> ReferenceRun:
    """The answers of the original; nothing is planned."""
    use_true_fp32()
    model, samples = model_of(name)
    subject = Subject(model.program, model.spec, samples, Precision(), ("torch",), Path(), {})
    return ProgramForms(subject).reference_run(samples.split()[1])


def refusals(name: str, answers: Answers) -> list[str]:
    """The rules that do not hold."""
    report = judge_engine(run_of(name), "fp16", OtherEngine("engine", "here", answers))
    return [failure.rule for failure in report.all_failures]


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_PARTS)
def test_an_engine_with_a_faulty_part_is_refused(fault: str) -> None:
    name, sabotage = IN_PARTS[fault]
    module = module_of(name)
    sabotage(module)
    assert refusals(name, engine_of(name, module))


@pytest.mark.slow
@pytest.mark.parametrize("fault", AROUND)
def test_an_engine_that_takes_or_gives_the_wrong_rows_is_refused(fault: str) -> None:
    name, sabotage = AROUND[fault]
    assert refusals(name, sabotage(engine_of(name, module_of(name))))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in (*IN_PARTS.values(), *AROUND.values())}))
def test_the_same_engine_without_a_fault_passes(name: str) -> None:
    assert refusals(name, engine_of(name, module_of(name))) == []
