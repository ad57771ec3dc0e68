"""The gate says what was learnt and what was lost, on the answers as they will be served."""

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.gate import Score, judge, scores

LOGITS = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim(3, 3))),),
    (TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="logits"),),
    max_batch_size=4,
)
VALUES = ModelSpec(
    "net", LOGITS.inputs, (TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="tensor"),), max_batch_size=4
)


def of(accuracy: float, rows: int = 100) -> dict[str, Score]:
    return {"y": Score("accuracy", accuracy, rows)}


def test_accuracy_counts_every_row_once_although_the_last_batch_is_filled_up() -> None:
    random = np.random.default_rng()
    x = random.standard_normal((10, 3)).astype(np.float32)
    targets = x.argmax(-1)
    targets[9] = (targets[9] + 1) % 3
    found = scores(LOGITS, lambda arrays: {"y": arrays["x"]}, Samples({"x": x}, {"y": targets}))
    assert found["y"] == Score("accuracy", 0.9, 10)


def test_a_negative_class_is_not_graded() -> None:
    x = np.eye(3, dtype=np.float32)
    found = scores(LOGITS, lambda arrays: {"y": arrays["x"]}, Samples({"x": x}, {"y": np.array([0, -1, 1])}))
    assert found == {"y": Score("accuracy", 0.5, 2)}
    assert scores(LOGITS, lambda arrays: {"y": arrays["x"]}, Samples({"x": x}, {"y": np.full(3, -1)})) == {}


def test_the_squared_error_is_the_mean_over_rows_and_elements() -> None:
    x = np.random.default_rng().standard_normal((7, 3)).astype(np.float32)
    found = scores(VALUES, lambda arrays: {"y": arrays["x"] + 2}, Samples({"x": x}, {"y": x}))
    assert found["y"].metric == "mse"
    assert found["y"].value == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize(
    ("held_out", "judging", "passes"),
    [
        ((0.5, 0.9), (0.99, 0.98), True),
        ((0.5, 0.5), (0.99, 0.97), True),  # no worse, and forgetting just within its tolerance
        ((0.5, 0.49), (0.99, 0.99), False),
        ((0.5, 0.9), (0.99, 0.96), False),
        ((0.5, float("nan")), (0.99, 0.99), False),
    ],
)
def test_nothing_learnt_may_be_worse_and_little_known_may_be_lost(
    held_out: tuple[float, float], judging: tuple[float, float], passes: bool
) -> None:
    active = {"held_out": of(held_out[0]), "judging": of(judging[0])}
    forms = {"torch": {"held_out": of(held_out[1]), "judging": of(judging[1])}}
    verdict = judge(forms, active, tolerance=0.02)
    assert verdict.passed is passes
    assert verdict.numbers["passed"] is passes
    if not passes:
        assert "not made active" in verdict.reason


def test_every_form_that_could_serve_is_held_to_it() -> None:
    active = {"held_out": of(0.5)}
    good, bad = {"held_out": of(0.9)}, {"held_out": of(0.4)}
    verdict = judge({"torch": good, "onnx": bad}, active, 0.02)
    assert not verdict.passed
    assert verdict.reason.startswith("the onnx form")


def test_a_growing_squared_error_is_a_loss() -> None:
    active = {"held_out": {"y": Score("mse", 1.0, 9)}, "judging": {"y": Score("mse", 1.0, 9)}}
    grown = {"held_out": {"y": Score("mse", 0.5, 9)}, "judging": {"y": Score("mse", 1.03, 9)}}
    assert not judge({"torch": grown}, active, 0.02).passed
    assert judge({"torch": grown}, active, 0.05).passed
