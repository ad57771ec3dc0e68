"""One optimizer with its schedule, and the step that it takes where the gradients are finite. Needs torch alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from .optimizers import optimizer_of
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
    """The optimizer of the parameters of ``module`` that learn, over a training of so many steps. Raises Stopped."""
    check_dtypes(module)
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(module, settings)
    schedule = scheduler_of(optimizer, settings, steps)
    return Learner(weights, optimizer, schedule, settings.clip_norm, Patience(settings))


def check_dtypes(module: nn.Module) -> None:
    """Raises Stopped where the optimizer would change weights in half: most of its changes would be rounded away."""
    half = {
        name: one.dtype for name, one in module.named_parameters() if one.requires_grad and one.itemsize < 4
    }
    if half:
        name, dtype = next(iter(half.items()))
        raise Stopped(
            "HALF_WEIGHTS",
            f"{len(half)} parameters that learn are in half ('{name}' is {str(dtype).removeprefix('torch.')}), and an "
            "optimizer needs weights in FP32: most of its changes are smaller than half can add. Build the module in "
            "FP32 (no .half(), .bfloat16() or torch_dtype=float16); the training itself computes in half",
        )


def gradient_norm(weights: Sequence[Tensor]) -> Tensor:
    """The global 2-norm of the gradients as they are now."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        raise Stopped(
            "USER_CODE",
            "no parameter received a gradient: the loss does not depend on them. Does forward run under no_grad, "
            "or detach what it computes?",
        )
    try:
        return get_total_norm(gradients)
    except NotImplementedError:  # so says torch of sparse ones
        if all(gradient.layout == torch.strided for gradient in gradients):
            raise
        shapes = [list(one.shape) for one in gradients if one.layout != torch.strided]
        raise Stopped(
            "SPARSE_GRADIENTS",
            f"the gradients of parameters {shapes} are sparse, and clipping and weight decay need whole ones. Build "
            "their tables with sparse=False (nn.Embedding, nn.EmbeddingBag, functional.embedding), and convert again",
        ) from None
