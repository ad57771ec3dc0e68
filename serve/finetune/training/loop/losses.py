"""The loss of each output of a job: a function of torch by its name, with class weights and label smoothing, or one of
the operator's folder. Each gives the mean over rows, in FP32. Needs torch alone."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .....models.folder.loss_and_optimizer_names import IGNORED
from .setting_names import MASK
from .training_terms import Stopped

Loss = Callable[[Tensor, Tensor], Tensor]
BALANCED = "balanced"
BCE_WITH_LOGITS = "bce_with_logits"


def losses_of(request: Mapping[str, Any], targets: Mapping[str, Tensor]) -> dict[str, Loss]:
    """The losses by output. ``targets``: of the rows to learn from, of which class weights are made."""
    found: dict[str, Loss] = {}
    for output, name in request["losses"].items():
        if ".py:" in name:
            found[output] = own_loss(name, request["source"])
        elif name in CLASS_LOSSES:
            target = targets[output]
            classes = target.argmax(-1) if target.is_floating_point() else target
            weights = ClassWeights(request.get("class_weights"), classes)
            found[output] = class_loss(name, weights, request.get("label_smoothing", 0.0))
        else:
            masked = request.get("missing_targets") == MASK
            found[output] = value_loss(name, request.get("pos_weight"), masked)
    return found


def counted(name: str, target: Tensor, masked: bool) -> Tensor | None:
    """True for each target that the loss's mean is over; None where that is every target."""
    if name in CLASS_LOSSES and not target.is_floating_point():
        return target != IGNORED
    return ~target.isnan() if masked and name in VALUE_LOSSES else None


class ClassWeights:
    """``asked``: one weight for each class, or "balanced": as many times as large as the class is rarer. They are
    scaled to a mean of 1 over the rows, so that a batch in parts has the same loss as in one."""

    def __init__(self, asked: list[float] | str | None, classes: Tensor) -> None:
        self.asked, self.classes = asked, classes
        self._made: Tensor | None = None

    def of(self, count: int, like: Tensor) -> Tensor | None:
        """``float32 [count]`` on the device of ``like``; None where none are asked for. Raises Stopped."""
        if self.asked is None:
            return None
        if self._made is None:
            self._made = self._weights(count).to(like.device)
        return self._made

    def _weights(self, count: int) -> Tensor:
        """A class without rows weighs 1."""
        rows = torch.bincount(self.classes[self.classes != IGNORED], minlength=count).double()
        if self.asked == BALANCED:
            shares = rows.sum() / (int((rows > 0).sum()) * rows)
            return torch.where(rows > 0, shares, 1.0).float()
        weights = torch.tensor(self.asked, dtype=torch.float64)
        if len(weights) != count:
            raise Stopped(
                "BAD_DATA",
                f"class_weights: expected one weight for each of the {count} classes, got {len(weights)}; give "
                f'{count} numbers, or "{BALANCED}"',
            )
        return (weights * rows.sum() / (weights * rows).sum()).float()


def class_loss(name: str, weights: ClassWeights, smoothing: float = 0.0) -> Loss:
    """The mean over the targets that are not `IGNORED`; 0 where all of them are. Targets that are floating point are
    shares of the classes along the last axis (soft labels)."""

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            weight, (scores, target) = (
                weights.of(scores.shape[-1], scores),
                (scores.reshape(-1, scores.shape[-1]), target.reshape(-1, target.shape[-1])),
            )
            return functional.cross_entropy(scores, target, weight, label_smoothing=smoothing)
        weight = weights.of(class_count(scores, target), scores)
        scores, target = classes_last(scores, target)
        kept = target != IGNORED
        each = CLASS_LOSSES[name](scores, target.where(kept, 0), weight, smoothing)
        return each.where(kept, 0.0).sum() / kept.sum().clamp(min=1)

    return loss


def value_loss(name: str, pos_weight: float | list[float] | None = None, masked: bool = False) -> Loss:
    """``pos_weight``: of ``bce_with_logits``, one number, or one for each value along the last axis. ``masked``: the
    mean over the values whose target is not NaN; 0 where all are."""

    def loss(answer: Tensor, target: Tensor) -> Tensor:
        if answer.shape != target.shape:  # torch would broadcast
            raise Stopped("BAD_DATA", f"targets {list(target.shape)} do not fit answers {list(answer.shape)}")
        weight, target = _pos_weight(answer), target.float()
        if masked:
            given = ~target.isnan()
            weight = weight if weight is None else weight.expand_as(answer)[given]
            answer, target = answer[given], target[given]
            if not len(answer):
                return answer.sum()  # the mean of nothing would be NaN
        if weight is not None:
            return functional.binary_cross_entropy_with_logits(answer, target, pos_weight=weight)
        return VALUE_LOSSES[name](answer, target)

    def _pos_weight(answer: Tensor) -> Tensor | None:
        if pos_weight is None or name != BCE_WITH_LOGITS:
            return None
        weight = torch.tensor(pos_weight, dtype=answer.dtype, device=answer.device)
        if weight.ndim and len(weight) != answer.shape[-1]:
            wanted = f"one number, or one for each of the {answer.shape[-1]} values"
            raise Stopped("BAD_DATA", f"pos_weight: expected {wanted}, got {len(weight)}")
        return weight

    return loss


def own_loss(name: str, source: Mapping[str, Any]) -> Loss:
    """``FILE.py:FUNCTION`` of the operator's folder: called with answer (FP32) and target, it gives the mean loss."""
    called = own_function(name, source)
    return lambda answer, target: one_number(name, called(answer, target), "the answer")


def own_function(name: str, source: Mapping[str, Any], key: str = "loss") -> Callable[..., Any]:
    """``FILE.py:FUNCTION`` of the operator's folder, which model.toml names as ``key``. Raises Stopped where there is
    none."""
    file, _, function = name.partition(":")
    path = Path(source["folder"]) / file
    if source["folder"] not in sys.path:  # where the captured program is trained
        sys.path.insert(0, source["folder"])
    spec = importlib.util.spec_from_file_location(f"_halfeven_{key}_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Stopped("USER_CODE", f"{key} = {name!r}: the model folder has no file {file}")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    called = getattr(module, function, None)
    if not callable(called):
        raise Stopped("USER_CODE", f"{key} = {name!r}: {file} has no function {function}")
    return called


def one_number(name: str, found: Any, source: str) -> Tensor:
    """The value ``found`` of the loss ``name``, as a scalar. Raises Stopped where no training can use this value: it is
    not one number, or has no gradient for ``source``."""
    one = isinstance(found, Tensor) and found.numel() == 1
    if not one or (torch.is_grad_enabled() and not found.requires_grad):
        came = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise Stopped(
            "USER_CODE",
            f"loss = {name!r}: expected one number as a tensor that depends on {source}, got {came}; return the "
            "mean over the rows, without detach or item",
        )
    return found.reshape(())


def classes_last(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[…,C]`` and ``[…]`` become ``[N,C]`` and ``[N]``; ``[N,C,…]`` and ``[N,…]`` are torch's own layout."""
    if scores.ndim > 1 and scores.shape[:-1] == target.shape:
        return scores.flatten(0, -2), target.flatten()
    return scores, target


def class_count(scores: Tensor, target: Tensor) -> int:
    shape = classes_last(scores, target)[0].shape
    return shape[min(1, len(shape) - 1)]


def _cross_entropy(scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    return functional.cross_entropy(scores, target, weight, reduction="none", label_smoothing=smoothing)


def _nll(scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    return functional.nll_loss(scores, target, weight, reduction="none")


def _nll_of_probabilities(scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """A probability that half rounds to zero still has a finite loss and a slope."""
    return _nll((scores + 1e-6).log(), target, weight, smoothing)


def _multi_margin(scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    return functional.multi_margin_loss(scores, target, weight=weight, reduction="none")


def _kl_div(answer: Tensor, target: Tensor) -> Tensor:
    return functional.kl_div(answer, target, reduction="batchmean")  # the other mean is not the divergence


CLASS_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor | None, float], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "nll": _nll,
    "nll_of_probabilities": _nll_of_probabilities,
    "multi_margin": _multi_margin,
}
VALUE_LOSSES: Mapping[str, Loss] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
    "bce": functional.binary_cross_entropy,
    "kl_div": _kl_div,
    "poisson_nll": functional.poisson_nll_loss,
    "soft_margin": functional.soft_margin_loss,
}
