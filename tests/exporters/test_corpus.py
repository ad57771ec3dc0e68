"""Each model of the corpus, converted once: what is claimed of healthy architectures, of engineered traps, and of all.

Healthy ones convert by the lists alone. A trap is cured by a few FP32 nodes, or by none. What the gate passed stays
equal on inputs nobody has seen.
"""

import pytest

from tests.conversions import MAX_KEPT, converted, refused_on_unseen
from tests.corpus import CORPUS, cases

HEALTHY = {name for name, case in CORPUS.items() if not case.trap}
HOPELESS = [name for name, case in CORPUS.items() if case.hopeless]
HARMLESS = [name for name, case in CORPUS.items() if case.harmless]
every_model = pytest.mark.parametrize("name", cases([name for name in CORPUS if name not in HOPELESS]))


@every_model
def test_a_model_ends_proven_and_keeps_few_nodes_in_fp32(name: str) -> None:
    done = converted(name)
    assert done.passed, done.report and done.report.summary()
    assert len(done.kept) <= (2 if name in HEALTHY else MAX_KEPT)


@every_model
def test_what_the_gate_passed_holds_on_fresh_inputs(name: str) -> None:
    done = converted(name)
    assert done.fresh is None or done.fresh.passed, done.fresh.summary()


@every_model
def test_what_the_gate_passed_holds_in_every_draw_of_fresh_inputs(name: str) -> None:
    assert refused_on_unseen(name) == []


@pytest.mark.parametrize("name", cases(HARMLESS))
def test_what_only_looks_wrong_keeps_nothing(name: str) -> None:
    assert converted(name).kept == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPELESS)
def test_where_all_would_have_to_stay_fp32_the_half_is_refused(name: str) -> None:
    done = converted(name)
    assert done.report is not None and not done.report.passed
