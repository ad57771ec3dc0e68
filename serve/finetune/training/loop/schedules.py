"""The schedules of the learning rate, by torch.optim.lr_scheduler's own classes. Needs torch alone.

A schedule falls over the steps behind its warm-up, and counts steps that were taken.
"""

from collections.abc import Callable, Mapping
from typing import Any

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

from .setting_names import ONE_CYCLE
from .training_terms import Settings

# By name: the scheduler over so many steps.
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
        rise = (
            settings.warmup_ratio if settings.warmup_ratio * steps > 1 else 0.0
        )  # torch divides by the length of a rise of one step, which is 0
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
