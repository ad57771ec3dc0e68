"""Perturbed samples are judged apart: an error of one of them refuses a half, what they decide together does not."""

import json
from dataclasses import replace

import numpy as np
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.rejudge import judge_apart
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

U = 2.0**-11
SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),),
    (TensorSpec("y", "FP32", (Dim(), Dim(50, 50)), "logits"),),
    8,
)


def trial(random: np.random.Generator, error_u: float = 0.0, flips: int = 0) -> Trial:
    """Eight samples: the first errs by ``error_u``, and of ``flips`` others another class is the first choice."""
    original = random.uniform(-0.9, 0.9, (8, 50)).astype(np.float32)
    original[:, 0], original[:, 1] = 1.0, 1.0 - 1e-5
    half = original.copy()
    half[0, 7] += error_u * U
    half[1 : 1 + flips, 1] += 2e-5
    return Trial(tuple(range(8)), {"y": original}, {"y": half})


def judged(random: np.random.Generator, perturbed: Trial) -> ParityReport:
    report = judge(SPEC, "fp16", [trial(random)])
    return replace(report, perturbed=judge_apart(SPEC, "fp16", [perturbed], {}))


def test_an_error_on_a_perturbed_sample_refuses_and_says_where_it_was(random: np.random.Generator) -> None:
    report = judged(random, trial(random, error_u=4.5))
    (failure,) = report.all_failures
    assert not report.passed and failure.rule == "max_error"
    assert (
        failure.message.startswith("on a perturbed copy of the few samples, ")
        and "--samples" in failure.message
    )
    assert report.max_error_u == 0.0 and report.outputs[0].passed


def test_what_perturbed_samples_decide_together_does_not_refuse(random: np.random.Generator) -> None:
    flipped = trial(random, error_u=3.0, flips=5)
    assert [one.rule for one in judge(SPEC, "fp16", [flipped]).all_failures] == ["flips"]
    report = judged(random, flipped)
    assert (
        report.passed and report.outputs[0].decisions is not None and not report.outputs[0].decisions.flipped
    )


def test_they_are_counted_apart(random: np.random.Generator) -> None:
    report = judged(random, trial(random, error_u=3.0))
    assert report.samples == 8 and "over 8 samples and 8 perturbed ones" in report.summary()
    kept = json.loads(json.dumps(report.to_json()))
    assert kept["samples"] == 8 and kept["perturbed"]["samples"] == 8
    assert abs(kept["perturbed"]["max_error_u"] - 3.0) < 0.1 and kept["max_error_u"] == 0.0


def test_without_perturbed_samples_there_is_no_report_of_them() -> None:
    assert judge_apart(SPEC, "fp16", [], {}) is None
