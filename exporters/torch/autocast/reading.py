"""The dtype in which a node reads its floating inputs: the rule of each action, as in the autocast dispatch key.

Both the rewrite (`rewrite.py`) and the inference of dtypes (`dtypes.py`) use it, so that they cannot differ.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...graph.actions import Action


def read_as(action: Action, given: Iterable[torch.dtype], half: torch.dtype) -> torch.dtype | None:
    """The dtype in which a node reads its floating inputs (but float64); None: each in its own.

    ``given``: the dtypes of its floating inputs. The widest of them is half only where all are half.
    """
    if action is Action.HALF:
        return half
    if action in (Action.FP32, Action.FP32_BACK):
        return torch.float32
    if action is Action.WIDEST:
        return half if set(given) <= {half, torch.float64} else torch.float32
    return None


def with_dtype(target: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """``dtype=float32`` where the first argument is a floating tensor and no dtype was asked for."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.dtype == torch.float64:
        return args, kwargs
    schema = [argument.name for argument in target._schema.arguments]
    given = args[schema.index("dtype")] if schema.index("dtype") < len(args) else kwargs.get("dtype")
    if given is not None:
        return args, kwargs
    return args[: schema.index("dtype")], {**kwargs, "dtype": torch.float32}
