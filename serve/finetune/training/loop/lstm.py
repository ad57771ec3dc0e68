"""LSTM layers with FP32 inputs compute in FP32 where the processor has no half kernel for them. Needs torch alone.

Under CPU autocast torch gives such an LSTM to oneDNN in half, and oneDNN raises "could not create a primitive
descriptor": in FP16 on most processors, in BF16 on one without AVX-512. One whose input is half already goes another
way in torch, and is left alone. The half that is served has its LSTMs in FP32 too.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_LSTM = "lstm"  # of a module's code; with its overload, "lstm.input", of a captured program


def lstm_context(
    module: nn.Module, kind: str, dtype: torch.dtype, autocasts: bool
) -> AbstractContextManager[Any]:
    """The context manager for a forward of ``module`` on a device of this kind; it does nothing where no LSTM needs it.

    ``autocasts``: whether the forward is under autocast to ``dtype``.
    """
    if autocasts and kind == "cpu" and has_lstm(module) and not computes_lstm(dtype):
        return LstmInFp32()
    return nullcontext()


class LstmInFp32(TorchFunctionMode):
    """Inside, an LSTM with an FP32 input gets FP32 tensors and no autocast."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = getattr(func, "__name__", "").partition(".")[0] == _LSTM
        if not named or not args or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        wide_args, wide_kwargs = tree_map_only(Tensor, _widened, (tuple(args), kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return func(*wide_args, **wide_kwargs)


@lru_cache(4)  # the nodes of a captured program are thousands, and this is asked before every pass
def has_lstm(module: nn.Module) -> bool:
    parts = list(module.modules())
    targets = (
        str(node.target) for part in parts if isinstance(part, GraphModule) for node in part.graph.nodes
    )
    return any(isinstance(part, nn.LSTM) for part in parts) or any("aten.lstm." in one for one in targets)


@cache
def computes_lstm(dtype: torch.dtype) -> bool:
    """Whether this processor computes an LSTM in ``dtype``."""
    with torch.random.fork_rng(devices=()), torch.no_grad(), torch.autocast("cpu", dtype):
        try:
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        except RuntimeError:
            return False
    return True


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
