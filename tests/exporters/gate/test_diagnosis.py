"""Claims about why a half errs: range or precision, and how far it is from the floor."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from halfeven.exporters.gate.diagnosis import diagnosed, worst_sample
from halfeven.exporters.gate.parity import judge
from halfeven.exporters.gate.rejudge import rejudge
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec

U = 2.0**-11
SPEC = ModelSpec(
    "m", (TensorSpec("x", "FP32", (Dim(), Dim(3, 3))),), (TensorSpec("out", "FP32", (Dim(), Dim(5, 5))),)
)


def report(random: np.random.Generator, error_u: float, odd: float | None = None) -> ParityReport:
    """A half that errs by so many u of S at one place; ``odd``: what it answers to an adversarial input."""
    original = random.uniform(-1, 1, (20, 5)).astype(np.float32)
    original[0, 0] = 1.0
    half = original.copy()
    half[7, 2] += np.float32(error_u * U)
    real = [Trial(tuple(range(20)), {"out": original}, {"out": half})]
    if odd is None:
        return judge(SPEC, "fp16", real)
    bad = original[:1].copy()
    bad[0, 1] = odd
    return judge(SPEC, "fp16", real, [Trial((0,), {"out": original[:1]}, {"out": bad}, name="zeros")])


def test_a_half_that_passes_is_equal_with_its_distance_from_the_floor(random):
    (found,) = diagnosed(report(random, 3.0), report(random, 1.5)).diagnoses
    assert found.verdict == "equal" and found.distance == pytest.approx(2.0, rel=1e-3)
    assert found.error_u == pytest.approx(3, rel=1e-3) and found.floor_u == pytest.approx(1.5, rel=1e-3)


def test_where_only_the_half_fails_its_range_is_to_blame(random):
    half = diagnosed(report(random, 90.0), report(random, 2.0), {"node": "pow_1", "op": "pow"})
    (found,) = half.diagnoses
    assert found.verdict == "range" and "pow_1 (pow)" in found.message and "--keep" in found.message
    assert "Verdict range" in half.summary() and not half.passed


def test_where_the_floor_fails_too_precision_is_to_blame_and_the_override_is_named_that_accepts(random):
    half = diagnosed(report(random, 6.17), report(random, 5.0))
    (found,) = half.diagnoses
    assert found.verdict == "precision" and found.override == {"max_error_u": 6.2}
    assert "max_error_u = 6.2 under [parity]" in half.summary()
    kept = json.loads(json.dumps(half.to_json(), allow_nan=False))
    assert rejudge(kept, replace(ParityLimits(), **found.override)).passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_half_that_overflows_is_a_fault_of_range_and_no_override_is_named(random, value):
    original = random.uniform(-1, 1, (4, 5)).astype(np.float32)
    half = original.copy()
    half[1, 1] = value
    samples = (0, 1, 2, 3)
    broken = judge(SPEC, "fp16", [Trial(samples, {"out": original}, {"out": half})])
    (found,) = diagnosed(broken, report(random, 1.0)).diagnoses
    assert found.verdict == "range" and not found.override and found.distance == math.inf
    assert "under [parity]" not in found.message


def test_what_fails_under_an_adversarial_input_alone_is_a_fault_of_range_too(random):
    half, floor = report(random, 1.0, odd=math.nan), report(random, 1.0, odd=0.5)
    (found,) = diagnosed(half, floor).diagnoses
    assert not half.passed and found.verdict == "range"
    (both,) = diagnosed(half, report(random, 1.0, odd=math.nan)).diagnoses
    assert both.verdict == "precision"
    large, odd = report(random, 6.17), report(random, 6.17, odd=math.nan)
    assert diagnosed(large, large).diagnoses[0].override  # a limit would accept this one …
    assert not diagnosed(odd, odd).diagnoses[0].override  # … and none what is broken by an odd input


def test_without_a_floor_a_refusal_is_unknown_and_a_pass_is_equal(random):
    assert diagnosed(report(random, 9.0), None).diagnoses[0].verdict == "unknown"
    assert diagnosed(report(random, 1.0), None).diagnoses[0].verdict == "equal"


def test_two_exact_answers_are_at_the_floor(random):
    (found,) = diagnosed(report(random, 0.0), report(random, 0.0)).diagnoses
    assert found.distance == 1.0
    (far,) = diagnosed(report(random, 1.0), report(random, 0.0)).diagnoses
    assert far.distance == math.inf and json.dumps(far.to_json(), allow_nan=False)


def test_the_worst_sample_is_told_with_what_was_in_it(random):
    inputs = random.standard_normal((20, 3)).astype(np.float32)
    inputs[7] = [0.0, -2.0, 5.0]
    found = worst_sample(report(random, 3.0), Samples({"x": inputs}), {7: 14})
    assert (found["output"], found["sample"], found["row"]) == ("out", 7, 14)
    (reply,) = found["inputs"]
    assert (reply["least"], reply["largest"], reply["mean"], reply["zeros"]) == (-2.0, 5.0, 1.0, 1)
    assert reply["shape"] == [3] and reply["not_finite"] == 0


def test_an_exact_answer_has_no_worst_sample(random):
    assert worst_sample(report(random, 0.0), Samples({"x": np.zeros((20, 3), np.float32)})) == {}


def test_of_several_outputs_the_one_that_errs_most_of_its_limit_is_told(random):
    outputs = tuple(TensorSpec(name, "FP32", (Dim(), Dim(5, 5))) for name in ("a", "b", "c"))
    spec = ModelSpec("m", SPEC.inputs, outputs)
    original = random.uniform(-1, 1, (20, 5)).astype(np.float32)
    original[0, 0] = 1.0
    halves = {name: original.copy() for name in "abc"}
    for name, sample, error_u in (("a", 3, 0.5), ("b", 11, 3.0), ("c", 5, 1.0)):
        halves[name][sample, 2] += np.float32(error_u * U)
    found = judge(spec, "fp16", [Trial(tuple(range(20)), {name: original.copy() for name in "abc"}, halves)])
    reply = worst_sample(found, Samples({"x": np.zeros((20, 3), np.float32)}))
    assert (reply["output"], reply["sample"]) == ("b", 11)
    assert found.max_error_u == max(output.max_error_u for output in found.outputs) > 2.9
    assert found.sqnr_db == min(output.sqnr_db for output in found.outputs) == found.outputs[1].sqnr_db
