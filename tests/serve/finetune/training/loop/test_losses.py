"""Losses by torch's names: their values, class weights, label smoothing, and a function of the operator's folder."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.folder.loss_and_optimizer_names import (
    CLASS_LOSSES,
    IGNORED,
    LOSSES,
    NLL_OF_PROBABILITIES,
    VALUE_LOSSES,
    short_name,
)
from halfeven.serve.finetune.training.loop import losses as subject
from halfeven.serve.finetune.training.loop.losses import ClassWeights, class_loss, losses_of, value_loss
from halfeven.serve.finetune.training.loop.training_terms import Stopped
from torch import Tensor, nn
from torch.nn import functional

NONE = ClassWeights(None, torch.zeros(0, dtype=torch.int64))


def test_every_name_has_a_function_and_the_other_way_round() -> None:
    assert set(LOSSES) == {*subject.CLASS_LOSSES, *subject.VALUE_LOSSES}
    assert set(subject.VALUE_LOSSES) == set(VALUE_LOSSES)
    assert set(subject.CLASS_LOSSES) == {*CLASS_LOSSES, NLL_OF_PROBABILITIES}


@pytest.mark.parametrize("name", sorted(VALUE_LOSSES))
def test_a_loss_of_values_is_torch_s(name: str) -> None:
    answer, target = torch.rand(6, 5).clamp(0.01, 0.99), torch.rand(6, 5)
    long = {
        "bce": "binary_cross_entropy",
        "bce_with_logits": "binary_cross_entropy_with_logits",
        "kl_div": "kl_div",
    }
    of_torch = getattr(functional, long.get(name, f"{name}_loss"))
    kind = {"reduction": "batchmean"} if name == "kl_div" else {}
    assert torch.equal(value_loss(name)(answer, target), of_torch(answer, target, **kind))
    with pytest.raises(Exception, match=r"\[6, 1\] do not fit answers \[6, 5\]"):
        value_loss(name)(answer, target[:, :1])


def test_the_classes_of_torch_name_the_same_losses() -> None:
    x, classes = torch.rand(5, 3), torch.tensor([0, 1, 2, 1, 0])
    named = [name for name in dir(torch.nn) if name.endswith("Loss") and short_name(name) in LOSSES]
    assert {short_name(name) for name in named} == {*LOSSES} - {NLL_OF_PROBABILITIES}
    for name in named:
        own, short = getattr(torch.nn, name), short_name(name)
        if short in CLASS_LOSSES:
            found, expected = class_loss(short, ClassWeights(None, classes))(x, classes), own()(x, classes)
        else:
            found, expected = (
                value_loss(short)(x, x.flip(0)),
                (own(reduction="batchmean") if short == "kl_div" else own())(x, x.flip(0)),
            )
        assert torch.allclose(found, expected), name


def test_class_losses_agree_with_each_other_for_every_layout() -> None:
    logits, classes = torch.randn(6, 5, 7), torch.randint(0, 7, (6, 5))
    cross_entropy = class_loss("cross_entropy", NONE)
    last = cross_entropy(logits, classes)
    torch.testing.assert_close(last, functional.cross_entropy(logits.mT, classes))
    torch.testing.assert_close(last, cross_entropy(logits.mT, classes))  # torch's own layout
    torch.testing.assert_close(last, class_loss("nll", NONE)(logits.log_softmax(-1), classes))
    probabilities = class_loss(NLL_OF_PROBABILITIES, NONE)(logits.softmax(-1), classes)
    torch.testing.assert_close(last, probabilities, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_targets_that_are_not_learnt_have_no_part_in_the_mean_nor_a_gradient(name: str) -> None:
    scores, target = torch.randn(6, 3, requires_grad=True), torch.tensor([0, IGNORED, 2, 1, IGNORED, 2])
    loss = class_loss(name, ClassWeights("balanced", target))
    kept = target != IGNORED
    assert torch.allclose(loss(scores, target), loss(scores[kept], target[kept]))
    loss(scores, target).backward()
    assert scores.grad is not None and not scores.grad[~kept].any() and scores.grad[kept].any()
    assert loss(scores, torch.full((6,), IGNORED)) == 0, "a part of a batch may have padding alone"


def test_a_probability_of_zero_has_a_finite_loss_and_a_slope() -> None:
    probabilities = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = class_loss(NLL_OF_PROBABILITIES, NONE)(probabilities, torch.tensor([1]))
    loss.backward()
    assert loss.isfinite()
    assert probabilities.grad is not None
    assert probabilities.grad[0, 1] < 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_over_all_rows_class_weights_are_those_of_torch_and_parts_have_the_same_mean(
    smoothing: float,
) -> None:
    logits, classes = torch.randn(40, 3), torch.randint(0, 3, (40,))
    classes[:3] = torch.arange(3)
    asked = (torch.rand(3) + 0.1).tolist()
    loss = class_loss("cross_entropy", ClassWeights(asked, classes), smoothing)
    expected = functional.cross_entropy(logits, classes, torch.tensor(asked), label_smoothing=smoothing)
    torch.testing.assert_close(loss(logits, classes), expected)
    parts = [loss(logits[at], classes[at]) * len(at) / 40 for at in torch.arange(40).split([7, 21, 12])]
    torch.testing.assert_close(torch.stack(parts).sum(), expected)


def test_balanced_weights_make_every_class_count_alike() -> None:
    classes = torch.tensor([0] * 30 + [1] * 6 + [3] * 4)
    found = ClassWeights("balanced", classes).of(4, torch.zeros(1))
    assert found is not None
    assert torch.allclose(found[[0, 1, 3]] * torch.tensor([30, 6, 4]), torch.tensor(40 / 3))
    assert found[2] == 1, "a class without rows"


def test_weights_of_another_number_of_values_are_refused() -> None:
    with pytest.raises(Stopped, match="one for each of the 3 values, got 2"):
        value_loss("bce_with_logits", [1.0, 2.0])(torch.rand(4, 3), torch.rand(4, 3))


def test_weights_of_another_number_of_classes_are_refused() -> None:
    with pytest.raises(Exception, match="one weight for each of the 4 classes, got 3") as refused:
        ClassWeights([1.0, 2.0, 3.0], torch.tensor([0, 1])).of(4, torch.zeros(1))
    assert refused.value.code == "BAD_DATA"  # type: ignore[attr-defined]


OWN = """
from __future__ import annotations
from dataclasses import dataclass
import torch
import beside

@dataclass
class Share:
    of_mse: float

def half_of_mse(answer, target):
    return Share(beside.HALF).of_mse * ((answer - target) ** 2).mean()

def detached(answer, target):
    return ((answer - target) ** 2).mean().item()

def per_row(answer, target):
    return ((answer - target) ** 2).mean(1)
"""


def own(folder: Path, function: str) -> dict[str, Any]:
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("HALF = 0.5")
    return {"losses": {"y": f"own.py:{function}"}, "source": {"folder": str(folder)}}


def called(request: dict[str, Any]) -> tuple[Tensor, Tensor]:
    answer, target = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    return losses_of(request, {"y": target})["y"](answer, target), functional.mse_loss(answer, target)


def test_a_function_of_the_operator_s_folder_is_the_loss(tmp_path: Path) -> None:
    found, mse = called(own(tmp_path, "half_of_mse"))
    assert torch.equal(found, 0.5 * mse) and found.requires_grad


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("detached", "expected one number as a tensor that depends on the answer, got float"),
        ("per_row", "got a tensor [4]"),
        ("missing", "own.py has no function missing"),
    ],
)
def test_a_function_that_gives_no_loss_is_refused(tmp_path: Path, function: str, said: str) -> None:
    with pytest.raises(Exception, match=re.escape(said)) as refused:
        called(own(tmp_path, function))
    assert refused.value.code == "USER_CODE"  # type: ignore[attr-defined]


MASKED = {
    "mse": nn.MSELoss(), "l1": nn.L1Loss(), "smooth_l1": nn.SmoothL1Loss(), "huber": nn.HuberLoss(),
    "poisson_nll": nn.PoissonNLLLoss(), "bce_with_logits": nn.BCEWithLogitsLoss(), "soft_margin": nn.SoftMarginLoss(),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_a_missing_target_counts_nothing_and_the_others_as_torchs_loss_of_them_alone(name: str) -> None:
    """Some of several labels at once, or the labels of some positions, are not known."""
    answer = torch.randn(6, 3, 4, requires_grad=True)
    target = (torch.rand(6, 3, 4) > 0.5).float() * (2 if name == "soft_margin" else 1) - (
        int(name == "soft_margin")
    )
    there = torch.rand(6, 3, 4) > 0.4
    loss = value_loss(name, masked=True)(answer, target.where(there, math.nan))
    assert loss.item() == MASKED[name](answer[there], target[there]).item()
    (gradient,) = torch.autograd.grad(loss, answer)
    assert torch.isfinite(gradient).all() and not gradient[~there].any()
    none = value_loss(name, masked=True)(answer, torch.full_like(target, math.nan))
    assert none.item() == 0 and not torch.autograd.grad(none, answer)[0].any()


def test_the_weights_of_labels_hold_where_some_targets_are_missing() -> None:
    answer, target, weight = torch.randn(5, 3), (torch.rand(5, 3) > 0.5).float(), [1.0, 2.0, 5.0]
    there = torch.rand(5, 3) > 0.3
    found = value_loss("bce_with_logits", weight, masked=True)(answer, target.where(there, math.nan))
    each = nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor(weight))(answer, target)
    assert found.item() == pytest.approx(each[there].mean().item())


def test_soft_labels_of_one_row_without_an_axis_of_rows_have_the_loss_that_they_have_with_one() -> None:
    scores, target = torch.randn(3), torch.tensor([0.2, 0.5, 0.3])
    loss = class_loss("cross_entropy", ClassWeights(None, torch.zeros(1, dtype=torch.int64)))
    assert loss(scores, target) == loss(scores[None], target[None])
