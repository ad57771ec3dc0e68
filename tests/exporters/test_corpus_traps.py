"""Every engineered trap is cured by a few FP32 nodes, or by none, and the cure holds on inputs nobody has seen."""

import pytest

from tests.conversions import MAX_KEPT, converted, refused_on_unseen
from tests.corpus import CORPUS, cases

HOPELESS = [name for name, case in CORPUS.items() if case.hopeless]
TRAPS = [name for name, case in CORPUS.items() if case.trap and not case.hopeless]
HARMLESS = [name for name, case in CORPUS.items() if case.harmless]


@pytest.mark.parametrize("name", cases(TRAPS))
def test_a_trap_ends_proven(name: str) -> None:
    done = converted(name)
    assert done.passed, done.report and done.report.summary()


@pytest.mark.parametrize("name", cases(TRAPS))
def test_a_trap_needs_ten_fp32_nodes_at_most(name: str) -> None:
    assert len(converted(name).kept) <= MAX_KEPT


@pytest.mark.parametrize("name", cases(TRAPS))
def test_what_the_gate_passed_holds_on_fresh_inputs(name: str) -> None:
    done = converted(name)
    assert done.fresh is None or done.fresh.passed, done.fresh.summary()


@pytest.mark.parametrize("name", cases(TRAPS))
def test_what_the_gate_passed_holds_in_every_draw_of_fresh_inputs(name: str) -> None:
    assert refused_on_unseen(name) == []


@pytest.mark.parametrize("name", cases(HARMLESS))
def test_what_only_looks_wrong_keeps_nothing(name: str) -> None:
    assert converted(name).kept == []


@pytest.mark.parametrize("name", HOPELESS)
def test_where_all_would_have_to_stay_fp32_the_half_is_refused(name: str) -> None:
    done = converted(name)
    assert done.report is not None and not done.report.passed
