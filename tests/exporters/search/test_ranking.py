"""The order that a plan is held to is stricter than the gate: it was made from other samples than those that judge."""

from dataclasses import replace

import numpy as np
import pytest
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.search.ranking import ranking
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec

U = 2.0**-11
SPEC = ModelSpec("m", (TensorSpec("x", "FP32", (Dim(),)),), (TensorSpec("y", "FP32", (Dim(),), "score"),))
ROWS = 400


def scores() -> np.ndarray:
    return np.linspace(1.0, 2.0, ROWS, dtype=np.float32)


def answered(half: np.ndarray, original: np.ndarray | None = None) -> list[Trial]:
    return [Trial(tuple(range(ROWS)), {"y": scores() if original is None else original}, {"y": half})]


def tying(share: float) -> np.ndarray:
    half, pairs = scores(), ROWS * (ROWS - 1) / 2
    for index in range(int(share * pairs)):
        half[2 * index] = half[2 * index + 1]
    return half


@pytest.mark.parametrize(("share", "plans"), [(0.0003, True), (0.0008, False)])
def test_half_of_the_ties_that_the_gate_allows_are_too_many_for_a_plan(share: float, plans: bool) -> None:
    broken = ranking(SPEC, "fp16")
    assert broken is not None
    trials = answered(tying(share))
    assert "ties" not in {failure.rule for failure in judge(SPEC, "fp16", trials).all_failures}
    assert (broken(trials, True) is None) == plans


@pytest.mark.parametrize(("distance_u", "plans"), [(2.0, True), (3.5, False)])
def test_a_plan_swaps_nothing_that_is_near_the_allowed_error(distance_u: float, plans: bool) -> None:
    original = scores()
    original[201] = original[200] + distance_u * U * 0.9
    half = original.copy()
    half[200:202] = original[201:199:-1]
    trials = answered(half, original)
    broken = ranking(SPEC, "fp16")
    assert broken is not None and judge(SPEC, "fp16", trials).passed
    report = broken(trials, True)
    assert (report is None) == plans
    assert plans or (report is not None and "a plan is to stay below 3u" in report.summary())
    accepting = replace(SPEC, parity=ParityLimits(max_swaps=0.1, overridden=("max_swaps",)))
    accepted = ranking(accepting, "fp16")
    assert accepted is not None and accepted(trials, True) is None
    assert broken(trials, False) is None, "the gate's own limit"


def test_a_model_that_ranks_nothing_is_held_to_no_order() -> None:
    assert ranking(replace(SPEC, outputs=(TensorSpec("y", "FP32", (Dim(),)),)), "fp16") is None
