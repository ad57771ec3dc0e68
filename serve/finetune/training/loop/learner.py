"""One optimizer with its schedule, and the step that it takes where the gradients are finite. Needs torch alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from .norm_look import norms_of
from .passes import is_finite
from .patience import Patience
from .schedules import scheduler_of
from .training_terms import GRADIENT_OVERFLOW, Settings, Stopped


@dataclass
class Learner:
    """``weights``: the parameters that it changes. ``patience`` counts its skipped steps."""

    weights: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    clip_norm: float
    patience: Patience

    @property
    def rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def clear(self) -> None:
        """Before every step, after a skipped one too: its NaN must not stay."""
        self.optimizer.zero_grad(set_to_none=True)

    def take(self, scaler: torch.amp.GradScaler) -> tuple[float, str | None]:
        """Unscale, clip and step. The norm of the gradients before clipping, and the cause where no step was taken.
        The caller updates the scaler."""
        scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.weights)
        if not is_finite(read := norm.item()):
            return read, GRADIENT_OVERFLOW
        clip_grads_with_norm_(self.weights, self.clip_norm, norm)
        scaler.step(self.optimizer)
        self.scheduler.step()
        return read, None


def learner_of(module: nn.Module, settings: Settings, steps: int) -> Learner:
    """AdamW for the parameters of ``module`` that learn, over a training of so many steps. On CUDA in one kernel, which
    asks the scaler's flag there: otherwise the host would have to wait for it."""
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = parameter_groups(module, settings.weight_decay)
    fused = True if weights and all(weight.is_cuda for weight in weights) else None
    optimizer = torch.optim.AdamW(groups, settings.learning_rate, settings.betas, fused=fused)
    schedule = scheduler_of(optimizer, settings, steps)
    return Learner(weights, optimizer, schedule, settings.clip_norm, Patience(settings))


def parameter_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices and kernels; none for biases and the weights of norms, which have no size to shrink."""
    plain = {id(parameter) for part in norms_of(module) for parameter in part.parameters(recurse=False)}
    named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    spared = [one for name, one in named if one.ndim < 2 or id(one) in plain or name.endswith("bias")]
    ids = {id(one) for one in spared}
    return [
        {"params": [one for _, one in named if id(one) not in ids], "weight_decay": decay},
        {"params": spared, "weight_decay": 0.0},
    ]


def gradient_norm(weights: Sequence[Tensor]) -> Tensor:
    """The global 2-norm of the gradients as they are now."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        raise Stopped(
            "USER_CODE",
            "no parameter received a gradient: the loss does not depend on them. Does forward run under no_grad, "
            "or detach what it computes?",
        )
    return get_total_norm(gradients)
