"""A proof that misses gives more to FP32 before it is refused: by how much it missed decides how much more."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from halfeven.exporters.conversion.road import _Conversion
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.rule_verdicts import Failure
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import Diagnosis
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.plan.aims import RETREATS, SHARES
from halfeven.exporters.proof.prove import ReferenceRun
from halfeven.exporters.report.evidence import Form, _every_half_misses
from halfeven.exporters.search.delta_debugging import COMPLETE, EXHAUSTED, FAILED, NOT_NEEDED
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

U = 2.0**-11
# These are asked where the first proof misses by so much that the next share is likely to miss too.
FAR = [SHARES[0], SHARES[2]]
SPEC = ModelSpec(
    "m", (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),), (TensorSpec("y", "FP32", (Dim(), Dim(50, 50))),), 8
)


class Maker:
    """A maker that plans as asked, unless ``fixed``: then the first plan is the only one."""

    def __init__(self, fixed: bool = False) -> None:
        self.asked, self.fixed = list[float](), fixed

    def plan(self, planning: Samples, share: float, notify: Callable[[str], None]) -> bool:
        self.asked.append(share)
        return len(self.asked) == 1 or not self.fixed


def form(error_u: float, search: str, override: Mapping[str, float] | None = None) -> Form:
    """A form judged with one element that errs by so much; ``search``: the outcome for its plan. ``override``: that of
    its diagnosis; without one there is no diagnosis."""
    original = np.ones((8, 50), np.float32)
    half = original.copy()
    half[3, 3] += error_u * U
    report = judge(SPEC, "fp16", [Trial(tuple(range(8)), {"y": original}, {"y": half})])
    if override is not None:
        found = Diagnosis("y", "precision", error_u, error_u, 1.0, "", override)
        report = replace(report, diagnoses=(found,))
    return Form({"passed": report.passed, "search": search}, report)


def proofs(
    monkeypatch: pytest.MonkeyPatch,
    error_of: Callable[[float], float],
    maker: Maker,
    search: str = FAILED,
    override: Mapping[str, float] | None = None,
    names: tuple[str, ...] = ("torch",),
) -> list[tuple[float, str]]:
    """The plan's share and the form of each proof; ``names``: of the forms, which all err alike."""
    subject: Any = SimpleNamespace(forms=names)
    reference_run: Any = None
    draft: Any = None

    def made(self: _Conversion, name: str, reference_run: ReferenceRun) -> Form:
        asked.append((maker.asked[-1], name))
        return form(error_of(maker.asked[-1]), search, override)

    asked = list[tuple[float, str]]()
    monkeypatch.setattr(_Conversion, "_form", made)
    road = _Conversion(subject, cast(Any, maker), draft, lambda _: None)
    assert tuple(road._proven(Samples({}), reference_run)) == names
    return asked


def shares_asked(
    monkeypatch: pytest.MonkeyPatch,
    error_of: Callable[[float], float],
    fixed: bool = False,
    search: str = FAILED,
    override: Mapping[str, float] | None = None,
) -> list[float]:
    maker = Maker(fixed)
    proofs(monkeypatch, error_of, maker, search, override)
    return maker.asked


def test_a_form_is_not_proven_under_a_plan_that_another_form_misses_unless_there_is_no_other_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, (first, second, third) = ("torch", "onnx"), SHARES
    errors = {first: 4.05, second: 2.0}
    found = proofs(monkeypatch, errors.__getitem__, Maker(), names=names)
    assert found == [(first, "torch"), (second, "torch"), (second, "onnx")]
    found = proofs(monkeypatch, lambda share: 8.1, Maker(), names=names)
    assert found == [(first, "torch"), (third, "torch"), (third, "onnx")]


def test_a_near_miss_gives_more_to_fp32_until_the_proof_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = dict(zip([*SHARES, *RETREATS], [5.1, 4.1, 4.05, 4.001, 2.0], strict=False))
    assert shares_asked(monkeypatch, errors.__getitem__) == [*SHARES, *RETREATS[:2]]


def test_where_no_plan_passes_the_planning_samples_a_miss_by_a_factor_of_two_is_refused_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shares_asked(monkeypatch, lambda share: 8.1) == FAR


@pytest.mark.parametrize("outcome", [NOT_NEEDED, COMPLETE, EXHAUSTED])
@pytest.mark.parametrize(
    "error_u, retreats", [(8.1, RETREATS[1:]), (24.0, RETREATS[2:]), (1e6, RETREATS[2:])]
)
def test_a_plan_that_passed_and_misses_by_more_gives_as_much_more_at_once(
    monkeypatch: pytest.MonkeyPatch, outcome: str, error_u: float, retreats: tuple[float, ...]
) -> None:
    """A judged sample is more sensitive than those that chose the plan; in the end all is given."""
    assert shares_asked(monkeypatch, lambda share: error_u, search=outcome) == [*FAR, *retreats]


@pytest.mark.parametrize("missed", ["output 'y' errs by 9u", ""])
def test_a_form_that_passes_under_a_plan_that_misses_on_its_own_samples_serves_fp32(missed: str) -> None:
    forms, nothing = {"torch": form(2.0, FAILED)}, cast(Any, None)
    maker = SimpleNamespace(why_failed=lambda: missed, facts=lambda: {"half_nodes": 2})
    why = _Conversion(nothing, cast(Any, maker), nothing, nothing)._why_planning_fails(forms)
    assert missed in why and bool(why) == bool(missed)


def test_where_all_stays_in_fp32_the_verdict_names_the_output_that_misses_its_own_limit() -> None:
    report = form(24.0, COMPLETE).report
    assert report is not None
    (refused,) = report.outputs
    wide = replace(refused, name="wide", max_error_u=50.0, limit_u=100.0)
    why = _every_half_misses(replace(report, outputs=(wide, refused)))
    assert "errs by 24u in the proof, where 4u are allowed" in why and "max_error_u = 24" in why


def test_where_no_half_runs_the_verdict_repeats_what_it_raised() -> None:
    report = form(24.0, COMPLETE).report
    assert report is not None
    raised = Failure("does_not_run", "the half does not run with sample 0")
    assert raised.message in _every_half_misses(replace(report, outputs=(), failures=(raised,)))


def test_where_an_answer_is_not_finite_no_retreat_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity does not tell how much more has to stay in FP32."""
    assert shares_asked(monkeypatch, lambda share: np.inf, search=COMPLETE) == [*FAR, *RETREATS]


def test_where_no_plan_passes_the_planning_samples_an_answer_that_is_not_finite_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shares_asked(monkeypatch, lambda share: np.inf) == FAR


@pytest.mark.parametrize(("override", "retreats"), [({}, RETREATS[1:]), ({"max_error_u": 8.1}, ())])
def test_where_no_plan_passes_fp32_serves_unless_a_setting_would_accept_the_half(
    monkeypatch: pytest.MonkeyPatch, override: Mapping[str, float], retreats: tuple[float, ...]
) -> None:
    """A refusal names that setting; without one it would name no way out."""
    assert shares_asked(monkeypatch, lambda share: 8.1, override=override) == [*FAR, *retreats]


def test_where_integers_differ_the_reason_names_them_without_advice_that_was_followed() -> None:
    spec = replace(SPEC, outputs=(replace(SPEC.outputs[0], datatype="INT64"),))
    original, half = np.arange(8).reshape(8, 1), np.arange(8).reshape(8, 1) + np.eye(8, 1, dtype=np.int64)
    report = judge(spec, "fp16", [Trial(tuple(range(8)), {"y": original}, {"y": half})])
    why = _every_half_misses(report)
    assert "output 'y' (INT64) must be equal but differs in 1 element(s)" in why and "--keep" not in why


def test_all_that_can_be_given_is_given_before_a_near_miss_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shares_asked(monkeypatch, lambda share: 4.2) == [*SHARES, *RETREATS]


def test_where_no_other_plan_is_looked_for_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed plan, as O3 without a search has it, is proven or refused as it was asked for."""
    assert shares_asked(monkeypatch, lambda share: 4.2, fixed=True) == [*SHARES, RETREATS[0]]
