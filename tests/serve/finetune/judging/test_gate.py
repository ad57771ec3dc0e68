"""The gate tells what was learnt and what was lost, on the answers as they will be served."""

from typing import Any

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.proof.subject import FurtherVerdict
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.judging.gate import GateTerms, judge, predictions
from halfeven.serve.finetune.judging.judging_sets import HELD_OUT, JUDGING

LOGITS = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim(3, 3))),),
    (TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="logits"),),
    max_batch_size=4,
)
VALUES = ModelSpec(
    "net", LOGITS.inputs, (TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="tensor"),), max_batch_size=4
)


def of(targets: np.ndarray, right: int) -> dict[str, np.ndarray]:
    """Predictions, of which the first ``right`` are right."""
    rows = np.arange(len(targets))
    return {"y": np.where(rows < right, targets, (targets + 1) % 3)}


def judged(forms: dict[str, tuple[int, int]], active: tuple[int, int], **terms: Any) -> FurtherVerdict:
    """The verdict on 100 held-out and 100 judging rows, by how many of each are right."""
    targets = np.random.default_rng().integers(0, 3, 100)
    samples = Samples({"x": np.zeros((100, 3), np.float32)}, {"y": targets})
    found = {
        form: {HELD_OUT: of(targets, held), JUDGING: of(targets, old)} for form, (held, old) in forms.items()
    }
    before = {HELD_OUT: of(targets, active[0]), JUDGING: of(targets, active[1])}
    return judge(
        LOGITS,
        {HELD_OUT: samples, JUDGING: samples},
        found,
        before,
        GateTerms(**{"margin": 0.02, "against": 1, **terms}),
    )


def test_every_row_is_predicted_once_although_the_last_batch_is_filled_up() -> None:
    x = np.random.default_rng().standard_normal((10, 3)).astype(np.float32)
    samples = Samples({"x": x}, {"y": np.zeros(10, np.int64)})
    found = predictions(LOGITS, lambda arrays: {"y": arrays["x"]}, samples)
    assert np.array_equal(found["y"], x.argmax(-1))
    scores = predictions(LOGITS, lambda arrays: {"y": arrays["x"]}, samples, ["accuracy", "auroc"])
    assert np.array_equal(scores["y"], x)
    values = predictions(VALUES, lambda arrays: {"y": arrays["x"] + 2}, Samples({"x": x}, {"y": x}))
    assert np.array_equal(values["y"], x + 2)


def test_scores_that_are_nan_are_no_class() -> None:
    x = np.array([[np.nan, 0, 0], [0, -np.inf, 1]], np.float32)
    samples = Samples({"x": x}, {"y": np.zeros(2, np.int64)})
    assert predictions(LOGITS, lambda arrays: {"y": arrays["x"]}, samples)["y"].tolist() == [-1, 2]


@pytest.mark.parametrize(
    ("new", "active", "passes", "learns"),
    [
        ((95, 99), (50, 99), True, True),
        ((95, 97), (50, 99), True, True),  # two rows of 100 are within the noise
        ((95, 90), (50, 99), False, True),
        ((50, 99), (50, 99), True, False),
        ((51, 99), (50, 99), True, False),  # a gain within the noise
        ((40, 99), (50, 99), False, False),
    ],
)
def test_what_was_forgotten_refuses_and_what_was_not_learnt_does_not_promote(
    new: tuple[int, int], active: tuple[int, int], passes: bool, learns: bool
) -> None:
    verdict = judged({"torch": new}, active, against=7, not_judged="why")
    assert verdict.passed is verdict.numbers["passed"] is passes
    assert (verdict.numbers["not_learnt"] is None) is learns
    assert (verdict.numbers["against"], verdict.numbers["not_judged"]) == (7, "why")
    if not passes:
        assert "rows lost" in verdict.reason and "not made active" in verdict.reason
        several = judged(dict.fromkeys(("torch", "onnx", "original"), new), active).reason
        assert several.count("accuracy") == several.count("train longer") == 1, several
        assert several.startswith("the torch form") and "onnx, original" in several


def test_ten_seeds_of_a_job_worth_40_points_are_promoted_although_each_forgets_two_rows() -> None:
    for seed in range(10):
        random = np.random.default_rng(seed)
        before = int(random.integers(10, 50))
        old = int(random.integers(90, 101))
        verdict = judged({"torch": (before + 40, old - 2), "original": (before + 42, old - 1)}, (before, old))
        assert verdict.passed and verdict.numbers["not_learnt"] is None, verdict.reason


def test_every_form_that_could_serve_is_held_to_it() -> None:
    verdict = judged({"torch": (90, 99), "original": (90, 60)}, (50, 99))
    assert not verdict.passed and verdict.reason.startswith("the original form")
    assert verdict.numbers["forms"]["torch"][JUDGING]["y"]["comparison"]["holds"]
    assert judged({"torch": (90, 99), "original": (50, 99)}, (50, 99)).numbers["not_learnt"].count("original")


def test_a_growing_squared_error_is_a_loss_and_a_target_that_is_nan_is_not_graded() -> None:
    random = np.random.default_rng()
    x = random.standard_normal((200, 3)).astype(np.float32)
    targets = x.copy()
    targets[150:] = np.nan
    samples = {name: Samples({"x": x}, {"y": targets}) for name in (HELD_OUT, JUDGING)}

    def off(by: float) -> dict[str, np.ndarray]:
        return {"y": x + by}

    active = {HELD_OUT: off(1.0), JUDGING: off(1.0)}
    for grown, passes in ((1.0, True), (1.01, True), (1.1, False)):
        found = {"torch": {HELD_OUT: off(0.5), JUDGING: off(grown)}}
        verdict = judge(VALUES, samples, found, active, GateTerms(0.02, 1, ["mae", "mse"]))
        assert verdict.passed is passes
        facts = verdict.numbers["forms"]["torch"][JUDGING]["y"]
        assert (facts["metric"], facts["rows"]) == ("mae", 150)
        assert facts["metrics"] == pytest.approx({"mae": grown, "mse": grown**2}, rel=1e-4)


def test_an_answer_that_is_not_finite_is_refused() -> None:
    x = np.ones((30, 3), np.float32)
    samples = {HELD_OUT: Samples({"x": x}, {"y": x})}
    found = {"torch": {HELD_OUT: {"y": x * np.nan}}}
    verdict = judge(VALUES, samples, found, {HELD_OUT: {"y": x + 1}}, GateTerms(1.0, 1))
    assert not verdict.passed and verdict.numbers["not_learnt"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_version_whose_error_is_not_finite_on_some_rows_is_replaced_by_one_that_is_no_worse_on_the_others(
    rows: int, bad: float
) -> None:
    x = np.random.default_rng().standard_normal((40, 3)).astype(np.float32)
    active, samples = x + 1, Samples({"x": x}, {"y": x})
    active[:rows] = bad
    for new, passes in ((x + 0.5, True), (x + 1.5, rows == 40), (active, False)):
        found = {"torch": {HELD_OUT: {"y": new}, JUDGING: {"y": new}}}
        before = {HELD_OUT: {"y": active}, JUDGING: {"y": active}}
        verdict = judge(VALUES, {HELD_OUT: samples, JUDGING: samples}, found, before, GateTerms(0.02, 1))
        assert verdict.passed is passes, verdict.reason
        if passes:
            assert verdict.numbers["not_learnt"] is None
            assert verdict.numbers["forms"]["torch"][JUDGING]["y"]["comparison"]["gained_rows"] == rows


def test_a_version_that_ranks_some_rows_by_nan_is_replaced_by_one_that_does_not() -> None:
    random = np.random.default_rng()
    targets = np.arange(60) % 3
    samples = {HELD_OUT: Samples({"x": np.zeros((60, 3))}, {"y": targets})}
    before = random.random((60, 3)).astype(np.float32)
    before[7, 1] = np.nan
    for new, passes in ((np.eye(3)[targets], True), (np.eye(3)[targets - 1], False)):
        found = {"torch": {HELD_OUT: {"y": new.astype(np.float32)}}}
        verdict = judge(LOGITS, samples, found, {HELD_OUT: {"y": before}}, GateTerms(0.02, 1, ["auroc"]))
        assert verdict.passed is passes, verdict.reason


@pytest.mark.parametrize("positives", [0, 1, 3, 7])
def test_a_class_of_few_rows_or_none_refuses_no_version_by_its_ranking(positives: int) -> None:
    """A draw of the rows may lack such a class, and has no AUROC then."""
    random = np.random.default_rng()
    targets = {HELD_OUT: random.permutation(np.arange(60) % 3), JUDGING: (np.arange(60) < positives) * 1}
    samples = {name: Samples({"x": np.zeros((60, 3))}, {"y": each}) for name, each in targets.items()}
    before = {name: {"y": random.random((60, 3)).astype(np.float32)} for name in targets}
    after = {**before, HELD_OUT: {"y": np.eye(3, dtype=np.float32)[targets[HELD_OUT]]}}
    verdict = judge(LOGITS, samples, {"torch": after}, before, GateTerms(0.02, 1, ["auroc"]))
    assert verdict.passed and verdict.numbers["not_learnt"] is None, verdict.reason
    judged_by = verdict.numbers["forms"]["torch"][JUDGING]["y"]["metric"]
    assert judged_by == ("auroc" if positives else "accuracy")


def test_a_ranking_depends_neither_on_the_level_of_logits_nor_on_their_size() -> None:
    """The softmax of logits is the same at every level; where it rounds to 1, sharper logits rank the rows all the
    same."""
    random = np.random.default_rng()
    targets = np.arange(60) % 2
    samples = {HELD_OUT: Samples({"x": np.zeros((60, 3))}, {"y": targets})}
    logits = np.stack([np.zeros(60), random.standard_normal(60) + targets / 2, np.full(60, -9.0)], -1)
    level = random.uniform(0, 0.5, (60, 1))
    flat = 0.5 * (logits - logits.min(1, keepdims=True)) / np.ptp(logits) + level  # between 0 and 1
    for before, after in ((flat, flat + 1), (logits, 1000 * logits)):
        answers = [{HELD_OUT: {"y": one.astype(np.float32)}} for one in (before, after)]
        numbers = judge(
            LOGITS, samples, {"torch": answers[1]}, answers[0], GateTerms(0.02, 1, ["auroc"])
        ).numbers
        found = [one[HELD_OUT]["y"]["value"] for one in (numbers["active"], numbers["forms"]["torch"])]
        assert found[0] == pytest.approx(found[1], abs=1e-4)
