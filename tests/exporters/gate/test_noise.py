"""FP32's own noise: what it does not tell apart is reported, not judged, and a lost slice is refused all the same."""

import numpy as np
import pytest
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge, noise_of
from halfeven.exporters.gate.rejudge import rejudge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.proof.informative import why_noise_proves_nothing
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec

U = UNIT_ROUNDOFF["fp16"]
SIZE, FAINT_ROW = 40, 7


def spec(kind: str = "tensor", limits: ParityLimits | None = None) -> ModelSpec:
    rows = Dim()
    inner = (Dim(6, 6), Dim(SIZE, SIZE)) if kind == "tensor" else (Dim(SIZE, SIZE),)
    output = TensorSpec("out", "FP32", (rows, *inner), kind)
    return ModelSpec(
        "m", (TensorSpec("x", "FP32", (rows, Dim(3, 3))),), (output,), 8, parity=limits or ParityLimits()
    )


def trial(reference: np.ndarray, candidate: np.ndarray) -> Trial:
    return Trial(tuple(range(len(reference))), {"out": reference}, {"out": candidate})


def held(reference: np.ndarray, half: np.ndarray, again: np.ndarray | None = None) -> ParityReport:
    """``again``: the original evaluated another way."""
    itself = [] if again is None else [trial(reference, again)]
    return judge(spec(), "fp16", [trial(reference, half)], noise=noise_of(spec(), itself))


def rules(report: ParityReport) -> list[str]:
    return [failure.rule for failure in report.all_failures]


def score_map(random: np.random.Generator, faint: float) -> np.ndarray:
    """[8, 6, SIZE], all about 1 but for one row, whose largest magnitude is ``faint``."""
    found = random.uniform(0.3, 1, (8, 6, SIZE))
    found[..., FAINT_ROW] *= faint / np.abs(found[..., FAINT_ROW]).max()
    found[0, 0, 0] = 1.0
    return found.astype(np.float32)


def moved(random: np.random.Generator, original: np.ndarray, error: float) -> np.ndarray:
    return (original + error * random.standard_normal(original.shape)).astype(np.float32)


def test_a_row_that_fp32_itself_does_not_tell_apart_is_reported_and_not_judged(random):
    original = score_map(random, faint=5e-3)
    half, again = moved(random, original, 2e-4), moved(random, original, 8e-5)
    assert rules(held(original, half)) == ["slice_sqnr"]
    report = held(original, half, again)
    assert report.passed
    (axis,) = [axis for axis in report.outputs[0].axes if axis.axis == 2]
    assert (axis.reported, axis.judged) == (1, SIZE - 1) and axis.db[FAINT_ROW] < 30


def test_a_row_that_fp32_tells_apart_is_judged_whatever_the_others_are(random):
    original = score_map(random, faint=5e-3)
    assert rules(held(original, moved(random, original, 2e-4), moved(random, original, 1e-7))) == [
        "slice_sqnr"
    ]


def test_a_nearly_empty_row_below_the_error_of_every_element_is_not_held_to_a_ratio(random):
    original = score_map(random, faint=0.9 * 4 * U)
    assert held(original, moved(random, original, 1e-4)).passed


@pytest.mark.parametrize("faint", [0.9 * 4 * U, 1e-4, 2e-6])
def test_a_row_that_is_lost_is_refused_however_faint_it_is(random, faint):
    original = score_map(random, faint)
    half = original.copy()
    half[..., FAINT_ROW] = 0
    assert rules(held(original, half, moved(random, original, 1e-9))) == ["slice_sqnr"]


def test_no_limit_is_narrower_than_twice_the_noise_and_none_is_gone(random):
    original = random.uniform(0.5, 1, (8, 6, SIZE)).astype(np.float32)
    again = moved(random, original, 3 * U)
    alike, worse = moved(random, original, 3 * U), moved(random, original, 30 * U)
    assert "max_error" in rules(held(original, alike))
    assert held(original, alike, again).passed
    assert {"max_error", "sqnr"} <= set(rules(held(original, worse, again)))


def test_an_evaluation_that_is_not_finite_widens_nothing(random):
    original = random.uniform(0.5, 1, (8, 6, SIZE)).astype(np.float32)
    again = original.copy()
    again[2, 3, 4] = np.inf
    assert noise_of(spec(), [trial(original, again)]) == {}
    assert "max_error" in rules(held(original, moved(random, original, 30 * U), again))


def test_judged_again_from_its_numbers_the_noise_counts_as_it_did(random):
    original = random.uniform(0.5, 1, (8, 6, SIZE)).astype(np.float32)
    report = held(original, moved(random, original, 3 * U), moved(random, original, 3 * U))
    again = rejudge(report.to_json(), ParityLimits())
    assert report.passed and again.passed and again.to_json() == report.to_json()


def test_choices_that_fp32_itself_changes_may_change_twice_as_often(random):
    original = random.uniform(0, 1, (400, SIZE)).astype(np.float32)
    original[:, 0], original[:, 1] = 3.0, 3.0 - 1e-4
    again, half = original.copy(), original.copy()
    again[:8, 1] += 2e-4
    half[100:112, 1] += 2e-4
    logits = spec("logits")
    noise = noise_of(logits, [trial(original, again)])
    assert [f.rule for f in judge(logits, "fp16", [trial(original, half)]).all_failures] == ["flips"]
    assert judge(logits, "fp16", [trial(original, half)], noise=noise).passed
    half[200:300, 1] += 2e-4
    assert not judge(logits, "fp16", [trial(original, half)], noise=noise).passed


def test_an_error_that_only_the_noise_excuses_proves_nothing(random):
    limits, original = ParityLimits(), random.uniform(0.3, 1, (8, 6, SIZE)).astype(np.float32)
    half, again = moved(random, original, 3 * U), moved(random, original, 3 * U)
    within_noise = held(original, half, again)
    why = why_noise_proves_nothing([within_noise], limits, "born at 'n'; {}".format)
    assert within_noise.passed and "passes only because the FP32 model itself" in why
    assert "born at 'n'; give samples" in why
    assert why_noise_proves_nothing([held(original, half)], limits) == "", "a refusal has its own words"
    near = held(original, moved(random, original, 0.5 * U), again)
    assert near.passed and why_noise_proves_nothing([near], limits) == ""
    assert why_noise_proves_nothing([within_noise, near], limits) == "", "one form is proven"
