"""The loss of each output, and the losses, weights and targets that are refused before a job exists."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.errors import BadInput, BadSamples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.data.datasets import TrainingData
from halfeven.serve.finetune.jobs.choices.hyperparameters import read_hyperparameters
from halfeven.serve.finetune.jobs.choices.loss_choice import check_targets, losses_by_output

OWN = "losses.py:focal"
LEARNT = {"word": "cross_entropy", "size": "mse"}


def spec() -> ModelSpec:
    outputs = (
        TensorSpec("word", "FP32", (Dim(), Dim(3, 3)), "logits"),
        TensorSpec("size", "FP32", (Dim(), Dim(2, 2)), "tensor"),
        TensorSpec("share", "FP32", (Dim(), Dim(4, 4)), "probabilities"),
        TensorSpec("sizes", "FP32", (Dim(), Dim()), "tensor"),
    )
    return ModelSpec("net", (TensorSpec("x", "FP32", (Dim(), Dim(5, 5))),), outputs, 8)


def chosen(declared: str | None = None, learnt: dict[str, str] = LEARNT, **asked: object) -> dict[str, str]:
    return losses_by_output(spec(), learnt, declared, read_hyperparameters({"hyperparameters": asked}))


def test_a_job_s_loss_comes_before_the_model_s_and_that_before_the_kind_s() -> None:
    assert chosen() == LEARNT
    assert chosen(loss={"size": "smooth_l1_loss"}) == {"word": "cross_entropy", "size": "smooth_l1"}
    assert chosen(OWN) == {"word": OWN, "size": OWN}
    assert chosen(OWN, loss={"size": "l1"}) == {"word": OWN, "size": "l1"}
    values = {"size": "mse"}
    assert chosen(learnt=values, loss="binary_cross_entropy_with_logits") == {"size": "bce_with_logits"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"loss": "mae"}, "loss: expected one of cross_entropy, .*, got 'mae'"),
        ({"loss": {}}, "loss: expected a loss such as 'l1', or an object"),
        ({"loss": {"sise": "l1"}}, r"loss: 'sise' has no targets .* with targets: \['size', 'word'\]"),
        (
            {"loss": {"word": "l1"}},
            "l1 does not fit output 'word' of kind logits: expected one of cross_entropy",
        ),
        ({"loss": OWN}, r"losses\.py:focal' is a function .* write \[training\] loss = 'losses\.py:focal'"),
        (
            {"loss": {"word": "nll"}, "label_smoothing": 0.1},
            "label_smoothing: is read by loss cross_entropy only",
        ),
        ({"label_smoothing": 1}, "label_smoothing: expected a number from 0 to 0.99, got 1"),
        ({"class_weights": [1, 2]}, "class_weights: expected 3 numbers, one for each class of 'word', got 2"),
        (
            {"loss": {"size": "bce_with_logits"}, "pos_weight": [1, 2, 3]},
            "pos_weight: expected 2 numbers, one for each value of 'size', got 3",
        ),
        (
            {"class_weights": "equal"},
            'class_weights: expected "balanced", or a number above 0 .*, got .equal',
        ),
        ({"class_weights": [1, 0, 1]}, "class_weights: expected .* number above 0"),
        ({"ema_decay": 1}, "ema_decay: expected a number from 0 to 0.99999, got 1"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_what_was_expected(
    asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        chosen(**asked)
    assert caught.value.code == "bad_hyperparameter"


def test_weights_of_classes_need_an_output_of_classes() -> None:
    with pytest.raises(BadInput, match="class_weights: are read by losses of classes only"):
        chosen(learnt={"size": "mse"}, class_weights="balanced")
    assert chosen(class_weights=[1, 2, 0.5]) == LEARNT


def test_an_output_of_any_width_does_not_take_any_number_of_weights() -> None:
    fits: dict[str, Any] = {"learnt": {"sizes": "mse"}, "loss": "bce_with_logits"}
    assert (
        chosen(**fits, pos_weight=[1] * 4096) == chosen(**fits, pos_weight=3) == {"sizes": "bce_with_logits"}
    )
    with pytest.raises(
        BadInput, match="pos_weight: expected at most 4096 numbers, one for each value of 'si"
    ):
        chosen(**fits, pos_weight=[1] * 4097)


@pytest.mark.parametrize(
    ("loss", "row", "wanted"),
    [
        ("bce", [0.5, 1.1], "from 0 to 1"),
        ("poisson_nll", [3, -1], "from 0 to inf"),
        ("soft_margin", [1, 0.5], "-1 or 1"),
    ],
)
def test_targets_that_a_loss_cannot_have_are_named_by_row(loss: str, row: list[float], wanted: str) -> None:
    targets = np.ones((6, 2), np.float32)
    samples = Samples({"x": np.zeros((6, 5), np.float32)}, {"size": targets}, "file")
    data = TrainingData(samples, {"size": "mse"})
    check_targets({"size": loss}, data)
    targets[4] = row
    with pytest.raises(BadSamples, match=rf"'target:size', row 4: loss {loss} expects values {wanted}"):
        check_targets({"size": loss}, data)
    with pytest.raises(BadSamples, match=rf"row 6: loss {loss} expects values {wanted}"):
        check_targets({"size": loss}, replace(data, quarantined={0: "NaN", 3: "NaN"}))
    check_targets({"size": "mse"}, data)
