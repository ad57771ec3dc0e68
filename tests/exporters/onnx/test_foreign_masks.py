"""A mask sentinel becomes a number that half has, where FP32 answers as before; else it stays, in FP32."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.onnx.precision.masks import rewrite_masks
from halfeven.exporters.onnx.precision.oracle import Oracle
from halfeven.exporters.onnx.precision.profile import profile
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.ranges.masks import HIGH, LOW
from onnx import ModelProto

from tests.exporters.onnx.onnx_files import convert, errors_u, parsed
from tests.exporters.onnx.traps import f32, normal

LEAST = float(np.finfo(np.float32).min)
CHOSEN = "g (float[n,6,6] x, bool[n,6,6] hidden) => (float[n,6,6] y) { s = MatMul(x, w) m = Where(hidden, low, s) y = Softmax<axis=-1>(m) }"
ADDED = "g (float[n,6,6] x, float[n,6,6] mask) => (float[n,6,6] y) { s = MatMul(x, w) i = Sub(one, mask) p = Mul(i, low) m = Add(s, p) y = Softmax<axis=-1>(m) }"
GIVEN = "g (float[n,6,6] x, bool[n,6,6] hidden) => (float[n,6,6] y, float[n,6,6] m) { s = MatMul(x, w) m = Where(hidden, low, s) y = Softmax<axis=-1>(m) }"
POOLED = "g (float[n,6,6] x, bool[n,6,6] hidden) => (float[n,6] y) { s = MatMul(x, w) m = Where(hidden, low, s) t = ReduceMax<axes=[2], keepdims=0>(m) y = Clip(t, floor) }"


CAPTURED = "g (float[n,6,6] x, bool[n,6,6] hidden) => (float[n,6,6] y) { s = MatMul(x, w) m = Where(hidden, low, s) t = ReduceMax<keepdims=0>(s) c = Greater(t, one) y = If(c) <then_branch = a () => (float[n,6,6] p) { p = Mul(m, m) }, else_branch = e () => (float[n,6,6] q) { q = Neg(s) }> }"
SEVERAL = (
    "g (float[n,6,6] x, bool[n,6,6] hidden) => (float[n,6,48] y) { s = MatMul(x, w) "
    + " ".join(f"m{place} = Where(hidden, low{place}, s)" for place in range(8))
    + f" m = Concat<axis=-1>({', '.join(f'm{place}' for place in range(8))}) y = Softmax<axis=-1>(m) }}"
)


def model(text: str, low: float = LEAST, scale: float = 1.0, **more: object) -> ModelProto:
    weights = {"w": 0.3 * scale * normal(np.random.default_rng(3), 6, 6), "low": f32(low), "one": f32(1.0)}
    return parsed(text, {**weights, **{name: f32(value) for name, value in more.items()}})


def inputs(text: str, rows: int = 16) -> dict[str, np.ndarray]:
    """Inputs of which row 0 is masked altogether, row 1 not at all."""
    random = np.random.default_rng()
    hidden = random.random((rows, 6, 6)) < 0.4
    hidden[0], hidden[1] = True, False
    x = {"x": normal(random, rows, 6, 6)}
    return x | ({"mask": f32(~hidden)} if "mask" in text else {"hidden": hidden})


def rewritten(text: str, **more: float):  # type: ignore[no-untyped-def]
    program = normalise(model(text, **more), Path("model.onnx"))
    asked = inputs(text)
    return program, rewrite_masks(program, profile(program, [asked], "fp16"), [asked])


@pytest.mark.parametrize("text", [CHOSEN, ADDED])
@pytest.mark.parametrize("low", [LEAST, -1e9])
def test_the_rewritten_whole_answers_bit_for_bit_on_fresh_inputs(text: str, low: float) -> None:
    program, masks = rewritten(text, low=low)
    assert masks.done and masks.program is not program
    asked = inputs(text)
    one, other = (Oracle(each.model, each.weights).run(asked)["y"] for each in (program, masks.program))
    assert one.tobytes() == other.tobytes()
    assert np.allclose(one[0], 1 / 6)  # masked altogether: uniform
    assert low not in {float(array) for array in masks.program.weights.values() if array.ndim == 0}


@pytest.mark.parametrize(("text", "floors"), [(CHOSEN, 0), (ADDED, 1)])
def test_a_floor_stands_only_where_scores_are_added(text: str, floors: int) -> None:
    _, masks = rewritten(text)
    assert sum(node.op_type == "Max" for node in masks.program.nodes) == floors
    numbers = [float(array) for array in masks.program.weights.values() if array.ndim == 0]
    assert LOW in numbers and numbers.count(HIGH) == floors


def test_constants_that_are_rewritten_together_have_one_order_in_every_process() -> None:
    names = [f"low{place}" for place in range(8)]
    _, masks = rewritten(SEVERAL, **dict.fromkeys(names, LEAST))
    assert [name for name in masks.program.weights if "low" in name] == [f"{name}__low" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("text", [CHOSEN, ADDED, GIVEN])
def test_nothing_is_kept_and_the_half_is_right(text: str, level: str, tmp_path: Path) -> None:
    foreign = convert(tmp_path, model(text), inputs(text, 32), level)
    assert not any("saves casts" not in kept.reason for kept in foreign.kept)
    assert any("mask value" in note for note in foreign.notes)
    assert errors_u(foreign, inputs(text))["y"] <= 4.0


def test_an_output_that_holds_the_sentinel_holds_one_still(tmp_path: Path) -> None:
    _, masks = rewritten(GIVEN)
    asked = inputs(GIVEN)
    answer = Oracle(masks.program.model, masks.program.weights).run(asked)["m"]
    assert (answer[asked["hidden"]] == LOW).all() and (np.abs(answer[~asked["hidden"]]) < 100).all()


def test_a_clip_above_it_ends_a_sentinel() -> None:
    program, masks = rewritten(POOLED, floor=-8.0)
    assert masks.done
    asked = inputs(POOLED)
    one, other = (Oracle(each.model, each.weights).run(asked)["y"] for each in (program, masks.program))
    assert one.tobytes() == other.tobytes() and (one[0] == -8.0).all()


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (ADDED, {"low": -1e9, "scale": 400.0}),  # FP32 itself does not absorb such scores
        (CHOSEN, {"scale": 4e4}),  # scores that LOW does not lie under
        (POOLED, {"floor": -1e5}),  # the sentinel would come through as LOW
        (CHOSEN.replace("Softmax<axis=-1>(m)", "Sigmoid(m)"), {}),  # no softmax
        (CHOSEN.replace("Softmax<axis=-1>(m)", "Mul(m, m)"), {}),
        (CAPTURED, {}),  # the body is not looked into
        (CHOSEN.replace("y = Softmax", "k = Greater(m, one) f = Cast<to=1>(k) z = Add(m, f) y = Softmax"), {"one": -1e5}),
    ],
)  # fmt: skip
def test_what_cannot_be_proven_stays(text: str, more: dict[str, float]) -> None:
    """The rules alone decide: the answers to samples, which are asked as well, need not show the difference."""
    program = normalise(model(text, **more), Path("model.onnx"))
    masks = rewrite_masks(program, profile(program, [inputs(text)], "fp16"), [])
    assert masks.program is program and masks.done == ()


def test_what_the_samples_refute_stays_whatever_the_rules_say() -> None:
    """The profile has seen no such scores."""
    program = normalise(model(ADDED, low=-1e9), Path("model.onnx"))
    loud = inputs(ADDED)
    loud["x"] *= 1e4
    ranges = profile(program, [inputs(ADDED)], "fp16")
    assert rewrite_masks(program, ranges, []).done
    assert rewrite_masks(program, ranges, [loud]).done == ()
