"""Integers and booleans from a step may differ where FP32 itself lies near the step, and only in a small share."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge
from halfeven.exporters.gate.rejudge import rejudge
from halfeven.exporters.gate.steppers import find_stepped, steps_of
from halfeven.exporters.gate.steps import Step, Steps, distance_of
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.onnx.precision.ties import FileSteps
from halfeven.exporters.onnx.precision.ties import find_stepped as find_in_file
from halfeven.models.spec import ModelSpec, ParityLimits
from torch import nn

from tests.command_line import run
from tests.exporters.inputs.tensors import tensor
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal

U = UNIT_ROUNDOFF["fp16"]


def test_how_far_a_value_is_from_its_step() -> None:
    x = np.array([0.5, 0.75, -1.25, 2.0])
    assert np.allclose(distance_of("round", [x]), [0, 0.25, 0.25, 0.5])
    assert np.allclose(distance_of("floor", [x]), [0.5, 0.25, 0.25, 0])
    assert np.allclose(distance_of("compare", [x, np.array(0.5)]), [0, 0.25, 1.75, 1.5])


def test_only_what_is_near_a_step_may_differ_and_by_one_at_most() -> None:
    distances = np.array([[0.0, 3.9 * U, 4.1 * U, 0.0]])
    steps = Steps(["y"], lambda _: {"y": Step(distances, 1.0)}, U, lambda: [{}])
    mine, others = np.array([[5, 5, 5, 5]]), np.array([[6, 4, 6, 7]])
    assert steps.tolerated({}, {"y": mine}, {"y": others})["y"].tolist() == [[True, True, False, False]]
    assert steps.tolerated({}, {"y": mine}, {"y": mine}) == {}


@pytest.mark.parametrize(("tied", "passed"), [(0, True), (1, True), (5, True), (6, False)])
def test_the_share_of_such_elements_has_a_limit(tied: int, passed: bool) -> None:
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 4),), (tensor("y", "BOOL", -1, 100),), 8)
    mine = np.zeros((10, 100), bool)
    others = mine.copy()
    others.reshape(-1)[:tied] = True
    trial = Trial(tuple(range(10)), {"y": mine}, {"y": others}, {"y": mine != others}, stepped=frozenset("y"))
    report = judge(spec, "fp16", [trial])
    assert report.passed == passed and report.outputs[0].tied == tied
    if not passed:
        (failure,) = report.all_failures
        assert (
            "in 6 of 1000 elements" in failure.message
            and "give out the value before the step" in failure.message
        )
        assert rejudge(report.to_json(), ParityLimits(max_flips=0.006)).passed
        assert not rejudge(report.to_json(), ParityLimits()).passed


FILES = {
    "Greater": ("bool", "y = Greater(a, t)", "compare"),
    "LessOrEqual, reshaped": (
        "bool",
        "b = LessOrEqual(a, t) c = Reshape(b, back) y = Identity(c)",
        "compare",
    ),
    "Round, Clip, Cast": (
        "uint8",
        "b = Mul(a, ten) c = Round(b) d = Clip(c, zero, top) y = Cast<to=2>(d)",
        "round",
    ),
    "Cast alone": ("int64", "b = Mul(a, ten) c = Unsqueeze(b, ax) y = Cast<to=7>(c)", "floor"),
    "a Cast of a comparison": ("int64", "b = Greater(a, t) y = Cast<to=7>(b)", "compare"),
}


@pytest.mark.parametrize(("kind", "text", "step"), FILES.values(), ids=FILES)
def test_steps_of_a_file_are_found_and_measured(kind: str, text: str, step: str) -> None:
    random = np.random.default_rng()
    numbers = {"t": 0.1, "ten": 10.0, "zero": 0.0, "top": 255.0}
    weights: dict[str, Any] = {name: np.float32(number) for name, number in numbers.items()}
    weights |= {"w": normal(random, 4, 6), "back": np.array([0, -1]), "ax": np.array([2])}
    model = parsed(f"g (float[n,4] x) => ({kind}[n,k] y) {{ a = MatMul(x, w) {text} }}", weights)
    (found,) = find_in_file(model)
    assert (found.output, found.kind) == ("y", step)
    x = normal(random, 5, 4)
    a = (x @ weights["w"]).astype(np.float64)
    values = [a, np.array(numbers["t"])] if step == "compare" else [a * 10]
    measured = FileSteps(model, [found])({"x": x})["y"]
    np.testing.assert_allclose(measured.distances.reshape(5, -1), distance_of(step, values), atol=1e-4)
    assert measured.largest == pytest.approx(max(np.abs(value).max() for value in values), rel=1e-4)


@pytest.mark.parametrize("text", ["y = ArgMax<axis=1, keepdims=0>(a)", "s = Shape(a) y = Identity(s)"])
def test_what_comes_from_no_step_is_not_found(text: str) -> None:
    model = parsed(
        f"g (float[n,4] x) => (int64[k] y) {{ a = MatMul(x, w) {text} }}", {"w": np.eye(4, dtype=np.float32)}
    )
    assert find_in_file(model) == []


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 6), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layer(x) * 10
        if self.kind == "compare":
            return (a > 0.5).reshape(-1, 2, 3)
        return (
            a.round().clamp(0, 255).to(torch.uint8)
            if self.kind == "round"
            else a.to(torch.int64).unsqueeze(1)
        )


@pytest.mark.parametrize("kind", ["compare", "round", "floor"])
def test_steps_of_a_program_are_found_and_measured(kind: str) -> None:
    net, x = Net(kind), torch.randn(5, 4)
    module = torch.export.export(net, (x,)).run_decompositions().module(check_guards=False)
    (found,) = find_stepped(module, ["y"])
    assert (found.output, found.kind) == ("y", kind)
    measured = steps_of(module, [found], [x.numpy()])["y"]
    a = (net.layer(x) * 10).detach().double().numpy()
    expected = distance_of(kind, [a, np.array(0.5)])
    np.testing.assert_allclose(measured.distances.reshape(5, -1), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "text", "half"),
    [
        ("bool", "s = Sigmoid(d) y = Greater(s, h)", True),
        (
            "uint8",
            "e = Add(d, a) m = Mul(e, full) z = Clip(m, lo, full) q = Round(z) y = Cast<to=2>(q)",
            False,
        ),
    ],
    ids=["a mask of a threshold", "a picture of 256 levels"],
)
def test_a_file_that_ends_in_a_step_is_half_or_says_what_to_do(
    kind: str, text: str, half: bool, tmp_path: Path, random: np.random.Generator
) -> None:
    channels = 1 if kind == "bool" else 3
    text = f"g (float[n,3,16,16] x) => ({kind}[n,{channels},16,16] y) {{ a = Mul(x, one) c = Conv<pads=[1,1,1,1]>(a, k) r = Relu(c) d = Conv<pads=[1,1,1,1]>(r, k2) {text} }}"
    scales = {"h": 0.5, "one": 1.0, "full": 255.0, "lo": 0.0}
    weights: dict[str, Any] = {name: np.float32(number) for name, number in scales.items()}
    weights |= {"k": normal(random, 16, 3, 3, 3) * 0.3, "k2": normal(random, channels, 16, 3, 3) * 0.03}
    onnx.save(parsed(text, weights), tmp_path / "net.onnx")
    np.savez(tmp_path / "samples.npz", x=random.random((64, 3, 16, 16), np.float32))
    words = ("--samples", tmp_path / "samples.npz", "--store", tmp_path / "store")
    code, facts, said = run("convert", tmp_path / "net.onnx", *words)
    assert code == 0, said
    assert (facts["half"] is not None) == half or "give out the value before the step" in facts["reason"]
