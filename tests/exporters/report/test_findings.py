"""The page draws the findings of the engine itself: no section is spelt differently on its two sides."""

import pytest
from halfeven.exporters.report.page import render_html, render_terminal

from tests.conversions import converted, samples_of
from tests.slow import drawn

# a vanishing guard, a rewritten mask, a repair, a kept node in a body, a weight that half cannot hold, ties
MODELS = (
    "eps 1e-8 on a mean", "least float filled", "loud convolution", "branch by value", "huge weights", "topk",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(3, MODELS))
def test_every_finding_of_a_real_conversion_is_drawn(name: str) -> None:
    done = converted(name)
    findings = done.maker.findings(done.maker.reference_run(samples_of(name, 8, seed=1)))
    report = done.report and done.report.to_json()
    form = done.maker.facts() | {"passed": True, "max_error_u": 0.0, "sqnr_db": None, "parity": report}
    facts = {"model": name, "version": 1, "status": "live", "forms": {"torch": form}, **findings}
    page = render_html(facts)
    for kept in form["kept"]:
        assert kept["node"] in page
    for repair in findings.get("repairs", ()):
        assert repair["node"] in page
    for guard in findings["profile"]["guards"]:
        assert guard["node"] in page
    assert render_terminal(facts)
