"""The findings around a job's first steps: what the whole would cost, by a trial of which nothing is kept, and, before
them, which layers this processor trains much slower in a half precision than in FP32.

The job's own module is not run to find slow layers: a module that counts its calls would have another state afterwards.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from ....models.machine import kernel_costs
from .loop.batch_loop import BatchLoop
from .loop.setting_names import EMULATED
from .loop.training_terms import DATA_FAULTS, DTYPES, NO_ROWS
from .trainee import Trainee

_NAMED = 10


def first_steps(loop: BatchLoop, trainee: Trainee, steps: int) -> dict[str, Any]:
    """Take ``steps`` steps. Gives, for the last line of the process, seconds of the last step, steps of the job, and
    ``idle``: a sentence where parameters that are to learn had no gradient. Raises Stopped."""
    idle: list[str] = []
    seconds, began = math.nan, time.monotonic()
    causes: list[str | None] = []
    losses: list[float | None] = []
    for record in islice(loop.run(), steps):
        seconds, began = time.monotonic() - began, time.monotonic()
        causes.append(record.cause)
        losses.append(record.loss if math.isfinite(record.loss) else None)
        if record.cause not in (*DATA_FAULTS, NO_ROWS):
            idle = without_gradient(trainee.module)
    return {
        "type": "tried",
        "steps": len(causes),
        "total_steps": loop.steps,
        "seconds_per_step": seconds,
        "causes": causes,
        "losses": losses,
        "idle": idle_sentence(idle),
        **trainee.facts(),
    }


def without_gradient(module: nn.Module) -> list[str]:
    """The parameters that are to learn and had no gradient in the last step."""
    return sorted(name for name, one in module.named_parameters() if one.requires_grad and one.grad is None)


def idle_sentence(idle: Sequence[str]) -> str | None:
    """A sentence that names parameters without a gradient; None where there are none."""
    if not idle:
        return None
    named = ", ".join(f"'{name}'" for name in idle[:_NAMED])
    return (
        f"{len(idle)} parameters that are to learn have no gradient: {named}{', …' if idle[_NAMED:] else ''}. The loss "
        "does not depend on them: does forward run a part under no_grad, or detach it? Give targets for outputs that "
        "have none, or leave these parameters out by `trainable`"
    )


Costs = Callable[[torch.dtype, list[str]], Mapping[str, kernel_costs.Cost]]
WAYS_OUT = (
    f'precision = "auto" takes the fastest here, and "{EMULATED}" stores FP16 and computes products in FP32'
)


def slow_precision(precision: str, module: nn.Module, costs: Costs = kernel_costs.kernel_costs) -> str | None:
    """A sentence about the layers of ``module`` that are slow in ``precision`` or have no kernel in it; None where
    there are none. ``costs``: by default this processor's, measured."""
    if precision not in ("fp16", "bf16"):
        return None
    found = costs(DTYPES[precision], kernel_costs.kinds_of(module))
    slow = {kind: cost for kind, cost in found.items() if cost.slow_to_train}
    if not slow:
        return None
    named = ", ".join(
        f"{kind} {cost.training:.0f}" if cost.training else f"{kind} (no kernel: computed in FP32)"
        for kind, cost in slow.items()
    )
    return f"training in {precision} is slow on this processor, in times of FP32's processor time: {named}. {WAYS_OUT}"
