"""Healthy architectures convert by the lists alone, and stay equal on inputs nobody has seen."""

import pytest

from tests.conversions import converted, refused_on_unseen
from tests.corpus import CORPUS, cases

HEALTHY = [name for name, case in CORPUS.items() if not case.trap]


@pytest.mark.parametrize("name", cases(HEALTHY))
def test_a_healthy_model_ends_proven_and_keeps_hardly_anything(name: str) -> None:
    done = converted(name)
    assert done.passed, done.report and done.report.summary()
    assert len(done.kept) <= 2


@pytest.mark.parametrize("name", cases(HEALTHY))
def test_what_the_gate_passed_holds_on_fresh_inputs(name: str) -> None:
    done = converted(name)
    assert done.fresh is None or done.fresh.passed, done.fresh.summary()


@pytest.mark.parametrize("name", cases(HEALTHY))
def test_what_the_gate_passed_holds_in_every_draw_of_fresh_inputs(name: str) -> None:
    assert refused_on_unseen(name) == []
