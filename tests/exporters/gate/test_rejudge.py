"""Claims about a version judged again from the numbers it kept: exactly the verdict of a fresh run."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge
from halfeven.exporters.gate.rejudge import accepting_override, judge_apart, rejudge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import OutputVerdict, ParityReport
from halfeven.models.errors import BadInput
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec
from hypothesis import given, settings
from hypothesis import strategies as st

LIMITS = st.builds(
    ParityLimits,
    max_error_u=st.sampled_from([0.0, 0.5, 1.0, 4.0, 40.0, 1e4]),
    min_sqnr_db=st.sampled_from([None, 0.0, 20.0, 45.0, 60.0, 200.0]),
    min_slice_sqnr_db=st.sampled_from([0.0, 10.0, 30.0, 55.0, 120.0]),
    max_flips=st.sampled_from([0.0, 0.005, 0.1, 1.0]),
    max_ties=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    max_swaps=st.sampled_from([0.0, 1e-5, 0.1, 1.0]),
    min_top10_overlap=st.sampled_from([0.0, 0.9, 1.0]),
    overridden=st.sampled_from([(), ("max_error_u",), ("max_flips", "min_slice_sqnr_db")]),
)
FAULTS = ("none", "none", "nan", "inf", "sentinel", "shape", "integer", "names", "adversarial")


def spec(limits: ParityLimits) -> ModelSpec:
    rows = Dim()
    outputs = (
        TensorSpec("logits", "FP32", (rows, Dim(6, 6)), "logits"),
        TensorSpec("boxes", "FP32", (rows, Dim(3, 3), Dim(4, 4))),
        TensorSpec("ids", "INT64", (rows, Dim(2, 2)), "indices"),
        TensorSpec("score", "FP32", (rows,), "score"),
    )
    return ModelSpec("m", (TensorSpec("x", "FP32", (rows, Dim(3, 3))),), outputs, 8, parity=limits)


def answers(random: np.random.Generator, rows: int, error: float) -> tuple[dict, dict]:
    logits = random.standard_normal((rows, 6)).astype(np.float32)
    boxes = (random.standard_normal((rows, 3, 4)) * 100).astype(np.float32)
    boxes[:, 2] *= random.choice([0.0, 1e-9, 1e-3, 1.0])
    score = random.uniform(0.9, 1.0, rows).astype(np.float32)
    reference = {"logits": logits, "boxes": boxes, "ids": random.integers(0, 9, (rows, 2)), "score": score}
    candidate = {
        name: array if array.dtype.kind == "i" else _near(random, array, error)
        for name, array in reference.items()
    }
    return reference, {name: array.copy() for name, array in candidate.items()}


def _near(random: np.random.Generator, array: np.ndarray, error: float) -> np.ndarray:
    return (array * (1 + error * random.standard_normal(array.shape))).astype(np.float32)


def trials(seed: int, error: float, fault: str) -> tuple[list[Trial], list[Trial], dict]:
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    reference, candidate = answers(random, rows, error)
    if fault in ("nan", "inf"):
        candidate["boxes"][0, 1, 1] = math.nan if fault == "nan" else math.inf
    if fault == "sentinel":
        reference["logits"][:, 4] = candidate["logits"][:, 4] = -3.4e38
        candidate["logits"][0, 4] = random.choice([-1e5, -1.0])
    if fault == "shape":
        candidate["boxes"] = candidate["boxes"][:, :2]
    if fault == "integer":
        candidate["ids"][-1, 1] += 1
    if fault == "names":
        del candidate["ids"]
    odd_reference, odd_candidate = answers(random, 2, error)
    if fault == "adversarial":
        odd_candidate["logits"][1, 1] = math.nan
    ties = {} if fault == "integer" else {"ids": random.random((rows, 2)) < 0.3}
    if "ids" in ties and fault != "names":
        candidate["ids"] = np.where(ties["ids"], candidate["ids"] + 1, candidate["ids"])
    real = [Trial(tuple(range(rows)), reference, candidate, ties)]
    real += [Trial((0,), _first(reference), _first(candidate), _first(ties))]
    targets = {"logits": random.integers(-1, 6, rows)} if random.random() < 0.5 else {}
    return real, [Trial((0, 1), odd_reference, odd_candidate, name="zeros")], targets


def _first(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array[:1] for name, array in arrays.items()}


def saved(report: ParityReport) -> dict[str, Any]:
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    error=st.sampled_from([0.0, 1e-8, 1e-4, 1e-3, 3e-3, 0.05, 2.0]),
    fault=st.sampled_from(FAULTS),
    dtype=st.sampled_from(["fp16", "bf16"]),
    first=LIMITS,
    then=LIMITS,
    perturbed=st.booleans(),
)
def test_what_was_saved_gives_the_verdict_of_a_fresh_run(seed, error, fault, dtype, first, then, perturbed):
    real, odd, targets = trials(seed, error, fault)
    few = trials(seed + 1, 3 * error, fault)[0] if perturbed else []

    def judged(limits: ParityLimits) -> ParityReport:
        report = judge(spec(limits), dtype, real, odd, targets)
        return replace(report, perturbed=judge_apart(spec(limits), dtype, few, {}))

    kept, fresh = saved(judged(first)), judged(then)
    again = rejudge(kept, then)
    assert again.passed == fresh.passed and again.summary() == fresh.summary()
    assert saved(again) == saved(fresh)
    assert saved(rejudge(saved(again), first)) == kept


def test_nothing_is_accepted_by_limits_that_no_limit_can_excuse():
    boundless = ParityLimits(1e30, 0.0, 0.0, 1.0)
    for fault in ("nan", "inf", "shape", "integer", "names", "adversarial"):
        real, odd, targets = trials(5, 1e-4, fault)
        report = judge(spec(ParityLimits()), "fp16", real, odd, targets)
        assert not rejudge(saved(report), boundless).passed, fault


def test_no_real_sample_stays_a_refusal():
    report = judge(spec(ParityLimits()), "fp16", [])
    assert saved(rejudge(saved(report), ParityLimits(1e30))) == saved(report) and not report.passed


def test_a_report_without_statistics_is_refused_with_what_to_do():
    real, odd, targets = trials(1, 1e-4, "none")
    kept = saved(judge(spec(ParityLimits()), "fp16", real, odd, targets))
    for output in kept["outputs"]:
        del output["statistics"]
    with pytest.raises(BadInput, match="halfeven parity NAME@VERSION"):
        rejudge(kept, ParityLimits())


def test_the_statistics_of_many_samples_stay_bounded():
    rows = 5000
    answer = np.random.default_rng(0).standard_normal((rows, 6)).astype(np.float32)
    one = replace(spec(ParityLimits()), outputs=spec(ParityLimits()).outputs[:1])
    trial = Trial(tuple(range(rows)), {"logits": answer}, {"logits": answer * np.float32(1 + 1e-4)})
    report = judge(one, "fp16", [trial])
    (output,) = saved(report)["outputs"]
    assert len(output["statistics"]["errors"]) == 2048 and len(output["per_sample_error_u"]) == 512
    assert max(output["statistics"]["errors"]) == output["statistics"]["worst"]
    assert saved(rejudge(saved(report), ParityLimits(0.0))) == saved(
        judge(replace(one, parity=ParityLimits(0.0)), "fp16", [trial])
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), error=st.sampled_from([1e-4, 1e-3, 3e-3, 0.01]), limits=LIMITS)
def test_the_override_that_is_named_is_the_one_that_accepts(seed, error, limits):
    real, odd, _ = trials(seed, error, "none")
    report = judge(spec(limits), "fp16", real, odd)
    for output in report.outputs:
        override = accepting_override(output, UNIT_ROUNDOFF["fp16"])
        if output.passed:
            assert override is None
        if override is None or "max_kl_nats" in override:
            continue
        eased = replace(limits, **override)
        found = {found.name: found for found in rejudge(saved(report), eased).outputs}
        assert found[output.name].passed
        for failure, (key, value) in zip(output.failures, override.items(), strict=False):
            assert any(f"{key} = {value:g}" in reply.message for reply in output.failures), failure


def test_garbage_is_offered_no_override():
    real, odd, targets = trials(3, 2.0, "none")
    for output in judge(spec(ParityLimits()), "fp16", real, odd, targets).outputs:
        assert accepting_override(output, UNIT_ROUNDOFF["fp16"]) is None


@pytest.mark.parametrize("fault", ["nan", "integer", "shape"])
def test_what_no_limit_excuses_is_offered_no_override(fault):
    real, odd, targets = trials(5, 1e-4, fault)
    outputs = judge(spec(ParityLimits()), "fp16", real, odd, targets).outputs
    assert not all(output.passed for output in outputs)
    assert all(accepting_override(output, UNIT_ROUNDOFF["fp16"]) is None for output in outputs)


def one_output(original: np.ndarray, half: np.ndarray, limits: ParityLimits) -> OutputVerdict:
    one = replace(spec(limits), outputs=spec(limits).outputs[:1])
    trial = Trial(tuple(range(len(original))), {"logits": original}, {"logits": half})
    (output,) = judge(one, "fp16", [trial]).outputs
    return output


def test_one_answer_that_is_off_by_a_fifth_is_garbage_however_good_the_others_are():
    original = np.random.default_rng(0).uniform(-1, 1, (500, 6)).astype(np.float32)
    original[:, 0] = -1.0
    half = original.copy()
    for error, accepted in ((0.05, True), (0.2, False)):
        half[7, 0] = -1.0 - error
        output = one_output(original, half, ParityLimits(max_flips=1.0))
        assert output.sqnr_db > 20 and not output.passed and "max_error" in {f.rule for f in output.failures}
        assert (accepting_override(output, UNIT_ROUNDOFF["fp16"]) is not None) == accepted


def test_an_accuracy_that_is_lost_is_offered_no_override():
    limits = ParityLimits(1e9, 0.0, 0.0, 1.0)
    original = np.zeros((100, 6), np.float32)
    original[:, 0], original[:, 1] = 1e-3, 0.0
    half = original.copy()
    half[:5, 1] = 2e-3
    one = replace(spec(limits), outputs=spec(limits).outputs[:1])
    trial = Trial(tuple(range(100)), {"logits": original}, {"logits": half})
    (output,) = judge(one, "fp16", [trial], targets={"logits": np.zeros(100, np.int64)}).outputs
    assert [failure.rule for failure in output.failures] == ["accuracy"]
    output = replace(output, statistics={**output.statistics, "worst": 0.0})  # whatever its error
    assert accepting_override(output, UNIT_ROUNDOFF["fp16"]) is None


def test_an_override_is_named_only_where_all_that_is_broken_can_be_accepted():
    original = np.zeros((100, 6), np.float32)
    original[:, 0], original[:, 1] = 1.0, 1.0 - 1e-4
    half = original.copy()
    half[:50, 1] = 1.0 + 1e-2
    output = one_output(original, half, ParityLimits())
    assert {"max_error", "flips"} <= {failure.rule for failure in output.failures}
    assert accepting_override(output, UNIT_ROUNDOFF["fp16"]) is None
    half[1:] = original[1:]
    assert accepting_override(one_output(original, half, ParityLimits()), UNIT_ROUNDOFF["fp16"]) is not None
