"""FP16 without FP16 kernels: a product of half tensors is computed in FP32 and its result rounded to half.

That is what the tensor cores of a GPU do: they read half, add up in FP32 and round once. Activations and gradients are
stored in half, so they overflow and vanish as they do on a GPU, and the gradient scaler has the same work. On a
processor whose FP16 kernels are missing or slow a step takes about as long as in FP32. Needs torch alone.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

from .setting_names import EMULATED
from .training_terms import Settings

# The operators that a processor with FP16 units would compute there, forward and backward.
_OF_MATRICES = (
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "linear",
    "linear_backward",
)
_OF_LAYERS = ("convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
PRODUCTS = frozenset((*_OF_MATRICES, *_OF_LAYERS))


def emulated_context(settings: Settings, kind: str) -> AbstractContextManager[Any]:
    """Around the forward and the backward passes of a training on a device of this kind; does nothing where the
    precision is not the emulated one. A GPU computes so by itself."""
    return EmulatedHalf() if settings.precision == EMULATED and kind == "cpu" else nullcontext()


class EmulatedHalf(TorchDispatchMode):
    """Inside, the products of half tensors accumulate in FP32. It acts below autocast and autograd, so that it meets
    the products of backward passes too."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = (tuple(args), kwargs or {})
        product = func.overloadpacket.__name__ in PRODUCTS and not func._schema.is_mutable
        if not product or not tree_any(_is_half, call):
            return func(*args, **(kwargs or {}))
        wide_args, wide_kwargs = tree_map_only(Tensor, _widened, call)
        return tree_map_only(Tensor, _rounded, func(*wide_args, **wide_kwargs))


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor
