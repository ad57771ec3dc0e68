"""The first steps of a job, taken to see what the whole would cost: nothing of them is kept."""

import math
import time
from itertools import islice
from typing import Any

from .loop.batch_loop import BatchLoop
from .loop.training_terms import DATA_FAULTS
from .trainee import Trainee

_NAMED = 10


def first_steps(loop: BatchLoop, trainee: Trainee, steps: int) -> dict[str, Any]:
    """Take ``steps`` steps. For the last line of the process: seconds of the last step, steps of the whole job, and
    ``idle``: parameters that are to learn and had no gradient. Raises Stopped."""
    idle: set[str] = set()
    seconds, began = math.nan, time.monotonic()
    causes: list[str | None] = []
    losses: list[float | None] = []
    for record in islice(loop.run(), steps):
        seconds, began = time.monotonic() - began, time.monotonic()
        causes.append(record.cause)
        losses.append(record.loss if math.isfinite(record.loss) else None)
        if record.cause not in DATA_FAULTS:
            idle = {
                name
                for name, one in trainee.module.named_parameters()
                if one.requires_grad and one.grad is None
            }
    return {
        "type": "tried",
        "steps": len(causes),
        "total_steps": loop.steps,
        "seconds_per_step": seconds,
        "causes": causes,
        "losses": losses,
        "idle": sorted(idle)[:_NAMED],
        "idle_count": len(idle),
        **trainee.facts(),
    }
