"""The result of a step may differ where FP32 itself lies near the step, and only in a small share."""

# ruff: noqa: E501  (graphs in their own lines)

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.gate.parity import UNIT_ROUNDOFF, judge
from halfeven.exporters.gate.rejudge import rejudge
from halfeven.exporters.gate.steps import Made, other_sides, steps_behind
from halfeven.exporters.gate.trial import Trial
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.precision.ties import ties_of as ties_of_file
from halfeven.exporters.onnx.reading.normalise import named_and_lifted as bare
from halfeven.exporters.question import TieTolerance
from halfeven.exporters.torch.program_answers import ties_of
from halfeven.models.program import runnable
from halfeven.models.spec.spec import ModelSpec, ParityLimits
from torch import nn

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed, spec_of
from tests.exporters.onnx.traps import normal
from tests.programs import original
from tests.specs import tensor

U = UNIT_ROUNDOFF["fp16"]
NEAR = 4 * U  # of a largest magnitude of 1


@pytest.mark.parametrize(
    ("kind", "value", "result", "others"),
    [
        ("round", [2.5 - NEAR / 2, 2.5 + NEAR / 2, 2.0, -1.5 + NEAR / 2], [2, 3, 2, -1], [3, 2, 2, -2]),
        ("floor", [3 - NEAR / 2, 3 + NEAR / 2, 2.5, 3 + 2 * NEAR], [2, 3, 2, 3], [3, 2, 2, 3]),
        ("floor", [3.0, 2.0 - NEAR / 2], [3, 1], [2, 2]),  # a whole number has no step above it
        ("ceil", [3.0, 3 + NEAR / 2, -NEAR / 2], [3, 4, 0], [4, 3, 1]),
        ("trunc", [-3 + NEAR / 2, -3 - NEAR / 2], [-2, -3], [-3, -2]),
        ("trunc", [0.0, NEAR / 2, -NEAR / 2, 3.0], [0, 0, 0, 3], [0, 0, 0, 2]),  # nor has zero one
    ],
)
def test_what_lands_on_the_other_side(
    kind: str, value: list[float], result: list[int], others: list[int]
) -> None:
    found = list(other_sides(kind, [np.array(value)], np.array(result), NEAR))
    changed = np.array(result) + sum(np.asarray(each) - np.array(result) for each in found)
    assert changed.tolist() == others


def test_the_other_sides_of_a_comparison_and_of_a_quantisation() -> None:
    values = [np.array([0.5 - NEAR / 2, 0.5 + NEAR / 2, 0.75]), np.array(0.5)]
    above, below = other_sides("compare", values, values[0] > values[1], NEAR)
    assert above.tolist() == [True, True, True] and below.tolist() == [False, False, True]
    values = [np.array([0.26 - 1e-4, 0.24, 99.0]), np.array(0.04), np.array(5, np.uint8)]
    (more,) = other_sides("quantize", values, np.array([11, 11, 255], np.uint8), 2e-3)
    assert more.tolist() == [12, 11, 255]
    for kind, value in (("quantize", 255.5 - NEAR / 2), ("trunc", 256 - NEAR / 2)):  # the type ends there
        values = [np.array([value]), np.array(1.0), np.array(0, np.uint8)]
        assert not [*other_sides(kind, values, np.array([255], np.uint8), NEAR)], kind
    (cast,) = other_sides(
        "trunc", [np.array([0.0, NEAR / 2, 1.0, 5.0])], np.array([False, True, True, True]), NEAR
    )
    assert cast.tolist() == [True, False, True, True], "a cast to truth values has its step at zero"
    assert not [*other_sides("round", [np.array([3.141])], np.array([3.14]), 0.7)], (
        "decimals are no whole numbers"
    )
    assert not [*other_sides("round", [np.array([2, 3])], np.array([2, 3]), 1.0)], (
        "whole numbers are near none"
    )


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


@pytest.mark.parametrize("datatype", ["BOOL", "FP32"])
def test_a_near_tie_counts_once_however_often_its_sample_is_asked(datatype: str) -> None:
    """By itself, in batches of several sizes, by two kernels: of few elements a single near tie may always be."""
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 4),), (tensor("y", datatype, -1, 3),), 8)
    mine = np.zeros((10, 3), spec.outputs[0].type.numpy)
    others = mine.copy()
    others[4, 1] = 1
    samples = tuple(range(10))
    batches = [slice(4, 5), slice(3, 6), slice(0, 10), slice(0, 10)]
    trials = [
        Trial(
            samples[some],
            {"y": mine[some]},
            {"y": others[some]},
            {"y": (mine != others)[some]},
            stepped=frozenset("y"),
        )
        for some in batches
    ]
    report = judge(spec, "fp16", trials)
    assert report.passed and report.outputs[0].tied == 1, report.summary()
    assert report.outputs[0].statistics["stepped"] == 30 and "but for 1 near tie" in report.summary()


EDGES = [-1.5, -0.5, 0.25, 1.0, 1.75]
X = np.random.default_rng(3).standard_normal((64, 4)).astype(np.float32)
# name → ONNX type, the file's end behind 'a', the same of a program, whether a half may answer the other side
ENDS: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Greater": ("bool", "y = Greater(a, t)", lambda a: a > 0.25),
    "LessOrEqual, reshaped": (
        "bool",
        "b = LessOrEqual(a, t) y = Reshape(b, back)",
        lambda a: (a <= 0.25).flatten(1),
    ),
    "both sides computed": (
        "bool",
        "m = ReduceMean<axes=[1]>(a) y = Less(a, m)",
        lambda a: a < a.mean(1, keepdim=True),
    ),
    "Round, Clip, Cast": (
        "uint8",
        "b = Mul(a, ten) c = Round(b) d = Clip(c, zero, top) y = Cast<to=2>(d)",
        lambda a: (a * 10).round().clamp(0, 255).to(torch.uint8),
    ),
    "Ceil of FP32": ("float", "b = Mul(a, ten) y = Ceil(b)", lambda a: (a * 10).ceil()),
    "Floor, divided": (
        "float",
        "b = Mul(a, ten) c = Floor(b) y = Div(c, ten)",
        lambda a: (a * 10).floor() / 10,
    ),
    "Cast alone": (
        "int64",
        "b = Mul(a, ten) c = Unsqueeze(b, ax) y = Cast<to=7>(c)",
        lambda a: (a * 10).long().unsqueeze(2),
    ),
    "Cast, remainder": (
        "int64",
        "b = Mul(a, ten) c = Cast<to=7>(b) y = Mod(c, three)",
        lambda a: (a * 10).long() % 3,
    ),
    "a Cast of a comparison": ("int64", "b = Greater(a, t) y = Cast<to=7>(b)", lambda a: (a > 0.25).long()),
    "Equal to a rounded number": (
        "bool",
        "b = Mul(a, ten) c = Round(b) y = Equal(c, two)",
        lambda a: (a * 10).round() == 2,
    ),
    "Sign": ("float", "y = Sign(a)", torch.sign),
    "Sign of a rounded number": (
        "float",
        "b = Mul(a, ten) c = Round(b) y = Sign(c)",
        lambda a: (a * 10).round().sign(),
    ),
    "the bucket of a number": (
        "int64",
        "b = Unsqueeze(a, ax) c = Less(edges, b) d = Cast<to=7>(c) y = ReduceSum<keepdims=0>(d, ax)",
        lambda a: torch.bucketize(a, torch.tensor(EDGES)),
    ),
    "two thresholds": (
        "bool",
        "b = Greater(a, t) c = Less(a, one) y = And(b, c)",
        lambda a: (a > 0.25) & (a < 1),
    ),
    "Where of integers": (
        "int64",
        "b = Greater(a, t) y = Where(b, seven, three)",
        lambda a: torch.where(a > 0.25, 7, 3),
    ),
    "Where of numbers": (
        "float",
        "b = Greater(a, t) y = Where(b, top, zero)",
        lambda a: torch.where(a > 0.25, 255.0, 0.0),
    ),
    "a count": (
        "int64",
        "b = Greater(a, t) c = Cast<to=7>(b) y = ReduceSum(c, last)",
        lambda a: (a > 0.25).sum(1, keepdim=True),
    ),
    "QuantizeLinear": (
        "uint8",
        "y = QuantizeLinear(a, tenth, mid)",
        lambda a: ((a / 0.1).round() + 128).clamp(0, 255).to(torch.uint8),
    ),
}

# name → how a program ends, where a file has several operations for it
PROGRAM_ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the place among sorted numbers": lambda a: torch.searchsorted(torch.tensor(EDGES), a),
    "the place from the right": lambda a: torch.searchsorted(torch.tensor(EDGES), a, side="right"),
    "the place among unsorted numbers": lambda a: torch.searchsorted(
        torch.tensor(EDGES[::-1]), a, sorter=torch.arange(len(EDGES) - 1, -1, -1)
    ),
    "the place among the numbers of its row": lambda a: torch.searchsorted(
        torch.tensor([EDGES]).repeat(a.shape[0], 1), a
    ),
    "the place of one number": lambda a: torch.searchsorted(torch.tensor(EDGES), a.reshape(-1)).reshape(
        a.shape
    ),
    "signbit": torch.signbit,
    "not of a rounded number": lambda a: torch.logical_not((a * 10).trunc()),
    "a quotient rounded down": lambda a: torch.div(a, 0.1, rounding_mode="floor"),
    "a quotient rounded to zero": lambda a: torch.div(a, torch.tensor([0.1]), rounding_mode="trunc"),
    "floor_divide": lambda a: a // 0.1,
    "fix": lambda a: (a * 10).fix(),
    "heaviside": lambda a: torch.heaviside(a, torch.ones(1)),
}


class Net(nn.Module):
    def __init__(self, weight: np.ndarray, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.end = nn.Parameter(torch.from_numpy(weight)), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(x @ self.weight)


@pytest.mark.parametrize("program", [False, True], ids=["file", "program"])
@pytest.mark.parametrize("name", ENDS)
def test_a_half_may_answer_what_lies_on_the_other_side_of_a_near_step_alone(name: str, program: bool) -> None:
    kind, text, end = ENDS[name]
    numbers = {"t": 0.25, "one": 1.0, "ten": 10.0, "zero": 0.0, "top": 255.0, "two": 2.0, "tenth": 0.1}
    weights: dict[str, Any] = {each: np.float32(number) for each, number in numbers.items()}
    weights |= {"w": normal(np.random.default_rng(5), 4, 60), "back": np.array([0, -1]), "ax": np.array([2])}
    weights |= {
        "three": np.array(3),
        "seven": np.array(7),
        "last": np.array([1]),
        "mid": np.array(128, np.uint8),
        "edges": np.array(EDGES, np.float32),
    }
    model = parsed(f"g (float[n,4] x) => ({kind}[n,k] y) {{ a = MatMul(x, w) {text} }}", weights)
    spec, net = spec_of(model), Net(weights["w"], end)
    samples = Samples({"x": X})
    if program:
        module = original(net, {"x": torch.from_numpy(X)})
        ties = ties_of(runnable(module.program), spec, "fp16", samples)
    else:
        ties = ties_of_file(*bare(model), spec, "fp16", samples)
    hold_the_near_alone(name, ties, net)


@pytest.mark.parametrize("name", PROGRAM_ENDS)
def test_so_may_the_half_of_a_program_that_ends_with_an_operation_which_a_file_has_not(name: str) -> None:
    net = Net(normal(np.random.default_rng(5), 4, 60), PROGRAM_ENDS[name])
    module = original(net, {"x": torch.from_numpy(X)})
    ties = ties_of(runnable(module.program), module.spec, "fp16", Samples({"x": X}))
    hold_the_near_alone(name, ties, net, module.spec.outputs[0].name)


def hold_the_near_alone(name: str, ties: TieTolerance | None, net: Net, output: str = "y") -> None:
    assert ties is not None

    def answers(moved: float) -> np.ndarray:
        with torch.inference_mode():
            a = torch.from_numpy(X) @ net.weight
            return net.end(a + moved * U * a.abs().max()).numpy()

    reference = answers(0)
    for moved, all_near in ((2, True), (-2, True), (300, False)):
        other = answers(moved)
        if other.shape != reference.shape or np.array_equal(other, reference):
            assert name == "both sides computed"  # which move together
            continue
        found = ties({"x": X}, {output: reference}, {output: other})[output]
        assert found[other != reference].all() == all_near, moved


# name → ONNX type, the file's end behind the scores 'a' [n,12], the same of a program
CHOICES: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "labels of a table": (
        "int64",
        "i = ArgMax<axis=1, keepdims=0>(a) y = Gather(labels, i)",
        lambda a: torch.tensor(LABELS)[a.argmax(1)],
    ),
    "numbers of a table": (
        "float",
        "i = ArgMin<axis=1, keepdims=0>(a) y = Gather(numbers, i)",
        lambda a: torch.tensor(NUMBERS)[a.argmin(1)],
    ),
    "labels of the best three": (
        "int64",
        "v, i = TopK(a, k) y = Gather(labels, i)",
        lambda a: torch.tensor(LABELS)[a.topk(3)[1]],
    ),
    "a place on a grid": (
        "int64",
        "i = ArgMax<axis=1>(a) r = Div(i, four) c = Mod(i, four) y = Concat<axis=1>(r, c)",
        lambda a: torch.cat([a.argmax(1, True) // 4, a.argmax(1, True) % 4], 1),
    ),
    "a place in pixels": (
        "float",
        "i = ArgMax<axis=1>(a) c = Mod(i, four) f = Cast<to=1>(c) m = Mul(f, eight) y = Add(m, half)",
        lambda a: (a.argmax(1, True) % 4).float() * 8 + 0.5,
    ),
    "one of twelve": (
        "float",
        "i = ArgMax<axis=1, keepdims=0>(a) y = OneHot(i, twelve, offon)",
        lambda a: (a.max(1)[1][:, None] == torch.arange(12)).float(),
    ),
    "a mask of one class": (
        "bool",
        "i = ArgMax<axis=1, keepdims=0>(a) y = Equal(i, seven)",
        lambda a: a.argmax(1) == 7,
    ),
}
LABELS = [70, 3, 900, 41, 5, 66, 12, 800, 9, 230, 31, 2]
NUMBERS = [float(place * 7 % 12) for place in range(12)]


@pytest.mark.parametrize("program", [False, True], ids=["file", "program"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_half_may_answer_what_the_next_index_of_a_near_choice_leads_to_alone(
    name: str, program: bool, random: np.random.Generator
) -> None:
    kind, text, end = CHOICES[name]
    weights: dict[str, Any] = {"labels": np.array(LABELS), "numbers": np.array(NUMBERS, np.float32)}
    weights |= {"k": np.array([3]), "four": np.array(4), "seven": np.array(7), "twelve": np.array(12)}
    weights |= {"one": np.float32(1), "eight": np.float32(8), "half": np.float32(0.5)}
    weights |= {"offon": np.array([0, 1], np.float32)}
    model = parsed(f"g (float[n,12] x) => ({kind}[n,k] y) {{ a = Mul(x, one) {text} }}", weights)
    near, far = 2 * U, 40 * U  # of a largest magnitude of 1
    x = np.stack([random.permutation(np.linspace(-1, 1, 12)) for _ in range(32)]).astype(np.float32)
    for row in x[:2]:  # of one near and one far choice the best is the class that a mask asks for
        row[[7, row.argmax()]] = row[[row.argmax(), 7]]
    order = x.argsort(1)
    rows, (least, next_least, second, best) = np.arange(32), (order[:, place] for place in (0, 1, -2, -1))
    gap = np.where(rows % 2, near, far).astype(np.float32)
    x[rows, second], x[rows, next_least] = x[rows, best] - gap, x[rows, least] + gap
    other, third = x.copy(), x.copy()
    for one, two, far_one in ((best, second, order[:, 5]), (least, next_least, order[:, 6])):
        other[rows, one], other[rows, two] = x[rows, two], x[rows, one]
        third[rows, one], third[rows, far_one] = x[rows, far_one], x[rows, one]

    def answers(scores: np.ndarray) -> np.ndarray:
        return end(torch.from_numpy(scores)).numpy()

    samples, spec = Samples({"x": x}), spec_of(model)
    if program:
        module = original(Choosing(end), {"x": torch.from_numpy(x)})
        ties = ties_of(runnable(module.program), spec, "fp16", samples)
    else:
        ties = ties_of_file(*bare(model), spec, "fp16", samples)
    assert ties is not None
    mine = answers(x)
    for scores, tolerated in ((other, rows % 2 == 1), (third, rows < 0)):
        theirs = answers(scores)
        differs = mine != theirs
        found = ties({"x": x}, {"y": mine}, {"y": theirs})["y"]
        asked = np.broadcast_to(tolerated.reshape(-1, *[1] * (mine.ndim - 1)), mine.shape)
        assert differs.any()
        if scores is other:
            assert (found[differs] == asked[differs]).all()
        elif name in ("labels of a table", "numbers of a table"):
            assert not found[differs].any(), "a class whose score is not near"


class Choosing(nn.Module):
    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(x * 1.0)


def test_a_mask_of_two_numbers_that_both_are_computed() -> None:
    """The local maxima of a map of scores: a neighbour that is nearly as large may be one too."""
    text = "g (float[n,1,2,2] x) => (bool[n,1,2,2] y) { m = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x) u = Expand(m, s) y = Equal(x, u) }"
    model = parsed(text, {"s": np.array([1, 1, 2, 2])})
    x = np.array([[[[1.0, 1 - U], [0.5, 0]]]], np.float32)
    ties = ties_of_file(*bare(model), spec_of(model), "fp16", Samples({"x": x}))
    mine, other = np.array([[[[True, False], [False, False]]]]), np.array([[[[True, True], [True, False]]]])
    assert ties is not None
    assert ties({"x": x}, {"y": mine}, {"y": other})["y"].tolist() == [[[[True, True], [False, False]]]]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("int64", "y = ArgMax<axis=1, keepdims=0>(a)"),
        ("int64", "s = Shape(a) y = Identity(s)"),
        ("float", "b = Greater(a, t) c = Cast<to=1>(b) y = Mul(a, c)"),
        ("float", "y = Relu(a)"),
        ("float", "b = Floor(a) c = com.microsoft.Gelu(a) y = Add(b, c)"),
    ],
)
def test_what_comes_from_no_step_is_not_found(kind: str, text: str) -> None:
    weights = {"w": np.eye(4, dtype=np.float32), "t": np.float32(0.1)}
    model = parsed(f"g (float[n,4] x) => ({kind}[k] y) {{ a = MatMul(x, w) {text} }}", weights)
    found: Mapping[str, Any] = getattr(
        ties_of_file(*bare(model), spec_of(model), "fp16", Samples({"x": X})), "stepped", {}
    )
    assert not found


def test_steps_behind_many_casts_are_found_in_few_looks() -> None:
    looks: list[int] = []

    def made(value: int) -> Made[int]:
        looks.append(value)
        return Made("Cast" if value else "", (value - 1,) if value else (), value % 2 == 1)

    assert steps_behind(61, made) == {1: "trunc"}
    assert len(looks) < 61**2


def test_numbers_from_a_step_that_tie_are_left_out_and_counted() -> None:
    spec = ModelSpec("m", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1, 100),), 8)
    mine = np.tile(np.arange(100, dtype=np.float32), (10, 1))
    for tied, passed in ((1, True), (5, True), (6, False)):
        others = mine.copy()
        others.reshape(-1)[:tied] += 1
        trial = Trial(
            tuple(range(10)), {"y": mine}, {"y": others}, {"y": mine != others}, stepped=frozenset("y")
        )
        report = judge(spec, "fp16", [trial])
        assert (
            report.passed == passed and report.outputs[0].tied == tied and report.outputs[0].max_error_u == 0
        )
        assert not judge(spec, "fp16", [Trial(trial.samples, {"y": mine}, {"y": others})]).passed


@pytest.mark.slow
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
