"""Apex's O2: the model computes in half throughout but for its norms, and its FP32 weights are the master weights.

A weight is cast anew when it has changed; the cast's own backward gives FP32 gradients, so they are FP32 before
`unscale_`, as Apex's master gradients are. Source: Apex's amp, opt levels (``keep_batchnorm_fp32``, here for every
norm). Needs torch alone.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Answers = tuple[Tensor, ...]


def norms_of(module: nn.Module) -> list[nn.Module]:
    """The normalisation layers, by the names of their classes: those of the operator's code too."""
    return [part for part in module.modules() if "Norm" in type(part).__name__]


class HalfModel:
    """The forward of ``module`` in ``dtype``, which may be changed between two passes. Norms get FP32 inputs and give
    half outputs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.dtype, self._module = dtype, module
        # By name: what was cast, its state then, and the half.
        self._halves: dict[str, tuple[Tensor, tuple[Any, ...], Tensor]] = {}
        norms = norms_of(module)
        self._spared = {id(one) for part in norms for one in (*part.parameters(), *part.buffers())}
        for part in norms:
            part.register_forward_pre_hook(lambda _, inputs: cast(inputs, torch.float32))
            part.register_forward_hook(lambda _, inputs, answer: cast(answer, self.dtype))

    def __call__(self, *inputs: Tensor) -> Answers:
        module = self._module
        tensors = (*module.named_parameters(), *module.named_buffers())
        own = {name: one for name, one in tensors if one.is_floating_point() and id(one) not in self._spared}
        half = {name: self._half(name, one) for name, one in own.items()}
        versions = {name: one._version for name, one in half.items()}
        answers = functional_call(module, half, cast(inputs, self.dtype))
        with torch.no_grad():
            for name, one in half.items():
                if one._version != versions[name]:  # a buffer that forward has changed
                    own[name].copy_(one)
        return answers

    def _half(self, name: str, one: Tensor) -> Tensor:
        """The tensor in half: the cast of the pass before, where it was made of the same values for the same use."""
        state = (one._version, self.dtype, one.requires_grad, torch.is_grad_enabled())
        source, known, half = self._halves.get(name, (None, (), one))
        if source is not one or known != state or half._version:  # or forward wrote into it
            half = one.to(self.dtype)
            self._halves[name] = one, state, half
        return half


def cast(values: Any, dtype: torch.dtype) -> Any:
    """A tensor, or the tensors of a tuple; what is no floating point tensor stays as it is."""
    if isinstance(values, tuple):
        return tuple(cast(one, dtype) for one in values)
    return values.to(dtype) if isinstance(values, Tensor) and values.is_floating_point() else values
