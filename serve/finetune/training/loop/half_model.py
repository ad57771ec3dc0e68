"""Apex's O2: the model computes in half throughout but for its norms, and its FP32 weights are the master weights.

A weight is cast anew when it has changed; the cast's own backward gives FP32 gradients, so they are FP32 before
`unscale_`, as Apex's master gradients are. Source: Apex's amp, opt levels (``keep_batchnorm_fp32``, here for every
norm). Needs torch alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from .norm_look import NormLook, norms_of
from .passes import restore, snapshot
from .seeding import generators_untouched
from .training_terms import DTYPES, Stopped

Answers = tuple[Tensor, ...]
NAMED, BY_LOOK = "fp32_modules names it", "its code normalises"


class HalfModel:
    """The forward of ``module`` in ``dtype``, which may be changed between two passes. The modules of ``in_fp32`` get
    FP32 inputs and give half outputs: torch's norms, those whose names fit a pattern of ``fp32_modules``, and those
    that are seen to normalise when the first rows come (`look`). Torch's batch norms take halves, and compute in FP32.
    ``norms`` False: norms compute in half too (O3).

    ``in_fp32``: by name, with the reason; ``mixed``: names of modules that normalise beside products, and so in half.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, fp32_modules: Sequence[str] = (), norms: bool = True
    ) -> None:
        self.dtype, self._module = dtype, module
        self.in_fp32: dict[str, str] = {}
        self.mixed: list[str] = []
        self._looked = not norms
        # The entry of each tensor's id: what was cast, its state then, and the half.
        self._halves: dict[int, tuple[Tensor, tuple[Any, ...], Tensor]] = {}
        named = {id(one): NAMED for _, one in named_modules(module, fp32_modules)}
        found = norms_of(module) if norms else []
        self._spare({id(one): f"a {type(one).__name__}" for one in found} | named)

    def look(self, *inputs: Tensor) -> None:
        """Follow the first forward, of a few rows, in FP32. Buffers and generators are as before."""
        if self._looked:
            return
        self._looked = True
        before, look, dtype = snapshot(self._module), NormLook(self._module), self.dtype
        self.dtype = torch.float32  # to which the modules that are kept already cast their answers
        with generators_untouched(), look.following():
            self._module(*inputs)
        self.dtype = dtype
        restore(before)
        self._spare({id(one): BY_LOOK for one in look.norms})
        mixed = {id(one) for one in look.mixed}
        parts = self._module.named_modules()
        self.mixed = [name for name, one in parts if id(one) in mixed and not self._is_spared(f"{name}.")]

    def __call__(self, *inputs: Tensor) -> Answers:
        self.look(*inputs)
        module = self._module
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        own = {name: one for name, one in tensors if one.is_floating_point() and not self._is_spared(name)}
        half = {name: self._half(one) for name, one in own.items()}
        versions = {name: one._version for name, one in half.items()}
        answers = functional_call(module, half, cast(inputs, self.dtype), tie_weights=False)
        with torch.no_grad():
            for name, one in half.items():
                if one._version != versions[name]:  # a buffer that forward has changed
                    own[name].copy_(one)
        return answers

    def copied(self, module: nn.Module) -> nn.Module:
        """A copy of ``module`` whose weights have the types in which a forward computes."""
        copied = deepcopy(module)
        for name, one in (*copied.named_parameters(), *copied.named_buffers()):
            if one.is_floating_point() and not self._is_spared(name):
                one.data = one.data.to(self.dtype)
        return copied

    @contextmanager
    def as_if(self, precision: str, module: str | None = None) -> Iterator[None]:
        """Inside, the model computes in another precision, or with one more module in FP32."""
        before, hooks = (self.dtype, dict(self.in_fp32)), list[RemovableHandle]()
        self.dtype = DTYPES[precision]
        if module is not None:
            hooks = self._spare({id(self._module.get_submodule(module)): NAMED})
        try:
            yield
        finally:
            self.dtype, self.in_fp32 = before
            for hook in hooks:
                hook.remove()

    def _spare(self, reasons: dict[int, str]) -> list[RemovableHandle]:
        """Keep these modules in FP32. What is inside of one needs no casts of its own."""
        hooks: list[RemovableHandle] = []
        for name, one in self._module.named_modules():
            if id(one) in reasons and not self._is_spared(f"{name}."):
                self.in_fp32[name] = reasons[id(one)]
                hooks.append(one.register_forward_hook(lambda _, inputs, answer: cast(answer, self.dtype)))
                if type(one).forward is _BatchNorm.forward:
                    continue  # its kernel computes halves in FP32: an FP32 copy would be kept for the backward pass
                wide = one.register_forward_pre_hook(
                    lambda _, args, kwargs: cast((args, kwargs), torch.float32), with_kwargs=True
                )
                hooks.append(wide)
        return hooks

    def _is_spared(self, name: str) -> bool:
        """True if a tensor of this name belongs to a module that stays in FP32."""
        return any(name.startswith(f"{owner}." if owner else "") for owner in self.in_fp32)

    def _half(self, one: Tensor) -> Tensor:
        """The tensor in half: the cast of the pass before, where it was made of the same values for the same use."""
        state = (one._version, self.dtype, one.requires_grad, torch.is_grad_enabled())
        source, known, half = self._halves.get(id(one), (None, (), one))
        if source is not one or known != state or half._version:  # or forward wrote into it
            half = one.to(self.dtype)
            self._halves[id(one)] = one, state, half
        return half


def named_modules(module: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The parts of ``module`` whose names fit a pattern of fp32_modules. Raises Stopped where a pattern fits none."""
    parts = [(name, one) for name, one in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in parts):
            names = ", ".join(f"'{name}'" for name, _ in parts[:10])
            raise Stopped(
                "NO_SUCH_MODULE",
                f"[training] fp32_modules: {pattern!r} fits no module of the model; expected names or patterns of its "
                f"modules: {names}{', …' if parts[10:] else ''}. Mend model.toml and convert again",
            )
    return [(name, one) for name, one in parts if any(fnmatchcase(name, each) for each in patterns)]


def without_autocast(module: nn.Module, patterns: Sequence[str], device: str) -> dict[str, str]:
    """From now on the named modules get FP32 inputs and no autocast. Their names, with the reason."""
    kind = torch.device(device).type

    def in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, enabled=False):
                return forward(*cast(args, torch.float32), **cast(kwargs, torch.float32))

        return called

    named = named_modules(module, patterns)
    for _, one in named:
        one.forward = in_fp32(one.forward)
    return {name: NAMED for name, _ in named}


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The values with their floating point tensors in ``dtype``; what is none stays as it is."""
    return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)
