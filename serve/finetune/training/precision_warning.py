"""Warns a job that asks for a half precision, before its steps, of the layers that this processor trains much slower
in that precision than in FP32.

The job's own module is not run to find this: a module that counts its calls would have another state afterwards.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ....models.machine import kernel_costs
from .loop.setting_names import EMULATED
from .loop.training_terms import DTYPES

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
