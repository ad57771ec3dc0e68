"""The first steps of a job, taken to see what the whole would cost: nothing of them is kept."""

import math
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import nn

from .loop.batch_loop import BatchLoop
from .loop.training_terms import DATA_FAULTS
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
        if record.cause not in DATA_FAULTS:
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
