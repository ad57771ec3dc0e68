"""A learner changes the weights: an optimizer with its groups of parameters, its schedule, and the step that it takes
where the gradients are finite. Needs torch alone.

The optimizer is one of torch's by its name, or what a function of the operator's folder makes. The schedules are
torch.optim.lr_scheduler's own classes; one falls over the steps behind its warm-up, and counts steps that were taken.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from .....models.folder.loss_and_optimizer_names import OPTIMIZERS
from .norm_look import norms_of
from .passes import is_finite
from .setting_names import ONE_CYCLE
from .training_terms import GRADIENT_OVERFLOW, Patience, Settings, Stopped

_POSITIONS = re.compile(r"(^|[._])(pos|wpe)($|[._]|ition|_?emb|_?enc)", re.IGNORECASE)
Group = dict[str, Any]


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
        """The gradients are removed before every step, after a skipped one too: its NaN must not stay."""
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


def optimizer_of(module: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer, on CUDA in one kernel where torch has it, which asks the scaler's flag there: otherwise the host
    would have to wait for it. Raises Stopped."""
    groups = parameter_groups(module, settings.weight_decay, settings.learning_rates)
    for group in groups:
        group["lr"] = settings.learning_rate * group.pop("factor", 1.0)
    if settings.make_optimizer is not None:
        return _own(settings.make_optimizer, groups)
    arguments, known = dict(settings.optimizer_args), OPTIMIZERS[settings.optimizer]
    if "betas" in known:
        arguments["betas"] = tuple(arguments.get("betas", settings.betas))
    there = [one for group in groups for one in group["params"]]
    if "fused" in known and not arguments.get("foreach") and there and all(one.is_cuda for one in there):
        arguments.setdefault("fused", True)
    return getattr(torch.optim, settings.optimizer)(groups, lr=settings.learning_rate, **arguments)


def parameter_groups(
    module: nn.Module, decay: float, factors: Mapping[str, float] | None = None
) -> list[Group]:
    """The parameters that learn, with ``weight_decay`` and without, and where ``factors`` (of the rate, by pattern; the
    first that fits counts) name some, those in groups of their own. Raises Stopped where a pattern fits none.

    Decay is for the matrices and kernels of products. None have biases, norms, scales, and what is added to
    activations: a parameter of the model's own code whose first axis is 1 is broadcast over the rows, and a table of
    positions is known by its name.
    """
    spared = {id(one) for part in norms_of(module) for one in part.parameters(recurse=False)}
    named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    spared |= {
        id(one) for name, one in named if one.ndim < 2 or name.endswith("bias") or _POSITIONS.search(name)
    }
    for owner in module.modules():
        of_torch = type(owner).__module__.startswith("torch.")
        for name, one in owner.named_parameters(recurse=False):
            if one.ndim >= 2 and one.shape[0] == 1 and not (of_torch and "weight" in name):
                spared.add(id(one))
    left, groups = dict(named), list[Group]()
    for pattern, factor in (factors or {}).items():
        fitting = [name for name in left if fnmatchcase(name, pattern)]
        if not fitting:
            raise Stopped(
                "NO_SUCH_PARAMETER",
                f"learning_rates: {pattern!r} fits no parameter that learns and has no rate yet; expected patterns of "
                f"names such as {list(left)[:5]}",
            )
        groups += [
            {**one, "factor": factor}
            for one in _by_decay([left.pop(name) for name in fitting], spared, decay)
        ]
    return [*_by_decay(list(left.values()), spared, decay), *groups]


def _by_decay(parameters: list[nn.Parameter], spared: set[int], decay: float) -> list[Group]:
    return [
        {"params": [one for one in parameters if id(one) not in spared], "weight_decay": decay},
        {"params": [one for one in parameters if id(one) in spared], "weight_decay": 0.0},
    ]


def _own(make: Any, groups: list[Group]) -> Optimizer:
    found = make(groups)
    if not isinstance(found, Optimizer):
        raise Stopped(
            "USER_CODE",
            "[training] optimizer: expected a function that takes groups of parameters (params, lr, weight_decay) and "
            f"gives a torch.optim.Optimizer, got {type(found).__name__}",
        )
    return found


# The scheduler of each name over so many steps.
_FALLING: Mapping[str, Callable[[Any, Settings, int], LRScheduler]] = {
    "cosine": lambda optimizer, asked, steps: CosineAnnealingLR(optimizer, steps),
    "constant": lambda optimizer, asked, steps: ConstantLR(optimizer, 1.0, steps),
    "linear": lambda optimizer, asked, steps: LinearLR(optimizer, 1.0, 0.0, steps),
    "polynomial": lambda optimizer, asked, steps: PolynomialLR(optimizer, steps, asked.schedule_power),
    "step": lambda optimizer, asked, steps: StepLR(optimizer, _period(asked, steps), asked.schedule_gamma),
    "exponential": lambda optimizer, asked, steps: ExponentialLR(
        optimizer, asked.schedule_gamma ** (1 / steps)
    ),
    "cosine_restarts": lambda optimizer, asked, steps: CosineAnnealingWarmRestarts(
        optimizer, _period(asked, steps)
    ),
}


def scheduler_of(optimizer: Optimizer, settings: Settings, steps: int) -> LRScheduler:
    """The scheduler of a training of so many steps; its rate is at most ``settings.learning_rate``."""
    if settings.schedule == ONE_CYCLE:
        steps = max(steps, 2)
        # Torch divides by the length of a rise of one step, which is 0.
        rise = settings.warmup_ratio if settings.warmup_ratio * steps > 1 else 0.0
        cycles = not {"momentum", "betas"}.isdisjoint(optimizer.defaults)
        rates = [group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, rates, total_steps=steps, pct_start=rise, cycle_momentum=cycles)
    rising = warm_up_steps(settings, steps)
    falling = _FALLING[settings.schedule](optimizer, settings, max(1, steps - rising))
    if rising == 0:
        return falling
    return SequentialLR(optimizer, [LinearLR(optimizer, 1 / rising, 1.0, rising), falling], [rising])


def warm_up_steps(settings: Settings, steps: int) -> int:
    """The steps before the whole rate is used. A warm-up of one step would have the whole rate at once: it is none."""
    asked = round(settings.warmup_ratio * steps)
    return 0 if asked < 2 else min(asked, steps - 1)


def _period(settings: Settings, steps: int) -> int:
    return max(1, round(settings.schedule_period * steps))
