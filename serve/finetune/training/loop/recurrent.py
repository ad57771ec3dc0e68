"""Recurrent layers under CPU autocast compute in FP32 where the processor cannot train them in half. Needs torch alone.

Torch gives an LSTM to oneDNN in half, and oneDNN may raise "could not create a primitive descriptor": in FP16 on most
processors, in BF16 on one without AVX-512, and on one with AVX512-FP16 in training alone. So each call is tried once as
it is used: the same flags, weights and lengths, with its backward pass. The half that is served has its LSTMs in FP32
too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of a module's code; "lstm.input" in a captured program
Call = tuple[Any, ...]  # positional arguments and those by name
Trains = Callable[[Any, Call, torch.dtype], bool]
Signature = tuple[Any, ...]


def recurrent_context(
    module: nn.Module, kind: str, dtype: torch.dtype, autocasts: bool
) -> AbstractContextManager[Any]:
    """The context manager for a forward of ``module`` on a device of this kind; it does nothing where no recurrent
    layer needs it.

    ``autocasts``: whether the forward is under autocast to ``dtype``.
    """
    if autocasts and kind == "cpu" and has_recurrent(module):
        return RecurrentInFp32(dtype)
    return nullcontext()


class RecurrentInFp32(TorchFunctionMode):
    """Inside, a recurrent call that cannot be trained in ``dtype`` gets FP32 tensors and no autocast.

    ``trains`` says whether a call can be: by default this processor is asked.
    """

    def __init__(self, dtype: torch.dtype, trains: Trains | None = None) -> None:
        super().__init__()
        self._dtype, self._trains = dtype, trains or trains_here

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = getattr(func, "__name__", "").partition(".")[0] in _RECURRENT
        call = (tuple(args), kwargs or {})
        if named and not self._trains(func, call, self._dtype):
            with torch.autocast("cpu", enabled=False):
                return _called(func, tree_map_only(Tensor, _widened, call))
        return _called(func, call)


@lru_cache(4)  # the nodes of a captured program are thousands, and this is asked before every pass
def has_recurrent(module: nn.Module) -> bool:
    parts = list(module.modules())
    if any(isinstance(part, nn.RNNBase) for part in parts):
        return True
    targets = (
        str(node.target) for part in parts if isinstance(part, GraphModule) for node in part.graph.nodes
    )
    return any(target.split(".")[:2] == ["aten", name] for target in targets for name in _RECURRENT)


_known: dict[Signature, bool] = {}


def trains_here(func: Any, call: Call, dtype: torch.dtype) -> bool:
    """True if this processor computes the call and its backward pass under autocast to ``dtype``; tried once for each
    kind of call. A call that FP32 does not run either is left to raise its own error."""
    signature = signature_of(func, call, dtype)
    if signature not in _known:
        _known[signature] = _runs(func, call, dtype) or not _runs(func, call, None)
    return _known[signature]


def signature_of(func: Any, call: Call, dtype: torch.dtype) -> Signature:
    """Calls with the same signature take the same kernel: function, flags, types, axes, and the sizes of weights."""
    leaves: list[Any] = []
    for place, leaf in enumerate(tree_leaves(call)):
        if isinstance(leaf, Tensor):
            # The first tensor has the rows; of the others, those with two axes are weights or lie beside packed rows.
            sizes = tuple(leaf.shape) if place and leaf.ndim == 2 else leaf.ndim
            leaves.append((leaf.dtype, sizes))
        else:
            leaves.append(leaf)
    return (str(func), dtype, *leaves)


def _runs(func: Any, call: Call, dtype: torch.dtype | None) -> bool:
    def alike(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        wide = torch.float32 if dtype is None else tensor.dtype
        return torch.zeros_like(tensor, dtype=wide, requires_grad=True)

    with (
        torch.random.fork_rng(devices=()),
        torch.enable_grad(),
        torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        try:
            states = _called(func, tree_map_only(Tensor, alike, call))[0]
            states.float().sum().backward()
        except RuntimeError:
            return False
    return True


def _called(func: Any, call: Call) -> Any:
    args, kwargs = call
    return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
