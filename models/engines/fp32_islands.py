"""FP32 islands in a live model: modules whose inputs are upcast and which run outside the autocast region.

``torch.autocast(enabled=False)`` alone upcasts nothing: a half tensor that enters such a region stays half and
meets FP32 weights there (torch.amp, "torch.autocast").
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

HALVES = (torch.float16, torch.bfloat16)


def raise_islands(module: nn.Module, paths: Iterable[str], device_type: str) -> Callable[[], None]:
    """Make the modules at ``paths`` islands, until the function that this gives is called.

    Floating tensors among a module's arguments are upcast, also inside lists, tuples and dictionaries.
    """
    islands = [module.get_submodule(path) for path in paths]
    before = [island.__dict__.get("forward") for island in islands]
    for island in islands:
        island.forward = _in_fp32(island.forward, device_type)

    def sink() -> None:
        for island, forward in zip(islands, before, strict=True):
            del island.forward
            if forward is not None:  # the operator's own, set on the instance
                island.forward = forward

    return sink


def _in_fp32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def island(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = tree_map(_widened, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            return forward(*wide_args, **wide_kwargs)

    return island


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
