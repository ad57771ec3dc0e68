"""Finds the modules that normalise by what they compute, whatever their names are. Needs torch alone.

A module normalises where it divides a tensor by a number that it has made from that tensor over an axis: a mean or a
mean square, then a root (RMSNorm, LayerNorm), or a standard deviation, or a norm. It is left out where a product or a
table is computed inside it too: it does more than to normalise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .emulated_half import PRODUCTS

_WITH_WEIGHTS = PRODUCTS | {"embedding", "_embedding_bag"}
_MEANS = frozenset(("mean", "sum", "var", "var_mean"))
_ROOTS_OF_MEANS = frozenset(("std", "std_mean", "norm", "linalg_vector_norm"))
_ROOTS = frozenset(("rsqrt", "sqrt"))
_NORMS = frozenset(
    (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "_fused_rms_norm",
        "_weight_norm_interface",
    )
)


class _Statistic(NamedTuple):
    """``tensor`` is held, so that no other one gets its id. ``size``: the numbers that it has, unexpanded."""

    tensor: Tensor
    is_root: bool
    size: int


class NormLook(TorchDispatchMode):
    """Inside, a forward of ``module`` is followed. ``norms``: the modules that only normalise; ``mixed``: those that
    normalise beside products."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._inside: list[nn.Module] = []
        self._statistics: dict[int, _Statistic] = {}
        self._found: dict[int, nn.Module] = {}
        self._busy: set[int] = set()

    @property
    def norms(self) -> list[nn.Module]:
        return [one for key, one in self._found.items() if key not in self._busy]

    @property
    def mixed(self) -> list[nn.Module]:
        return [one for key, one in self._found.items() if key in self._busy]

    @contextmanager
    def following(self) -> Iterator["NormLook"]:
        hooks: list[Any] = []
        for part in self._module.modules():
            hooks.append(
                part.register_forward_pre_hook(lambda one, _: self._inside.append(one), prepend=True)
            )
            hooks.append(part.register_forward_hook(lambda *_: self._left(), always_call=True))
        try:
            with self:
                yield self
        finally:
            self._statistics.clear()
            for hook in hooks:
                hook.remove()

    def _left(self) -> None:
        self._inside.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in _WITH_WEIGHTS:
            self._busy |= set(map(id, self._inside))
        elif name in _NORMS:
            self._normalises()
        elif name in _MEANS | _ROOTS_OF_MEANS:
            self._reduced(name, args[0], answer)
        elif isinstance(answer, Tensor):
            self._follow(name, args, answer)
        return answer

    def _reduced(self, name: str, source: Tensor, answer: Any) -> None:
        known = self._statistics.get(id(source))
        for one in tree_leaves(answer):
            over_an_axis = one.ndim or source.ndim == 1
            if one.is_floating_point() and over_an_axis and one.numel() < source.numel():
                is_root = name in _ROOTS_OF_MEANS or bool(known and known.is_root)
                self._statistics[id(one)] = _Statistic(one, is_root, one.numel())

    def _follow(self, name: str, args: Sequence[Any], answer: Tensor) -> None:
        """A result that is computed of statistics alone becomes a statistic too."""
        leaves = tree_leaves(list(args))
        known = [self._statistics[id(one)] for one in leaves if id(one) in self._statistics]
        if not known:
            return
        size = max(one.size for one in known)
        is_root = any(one.is_root for one in known)
        if is_root and name in ("mul", "div") and answer.numel() > size:
            self._normalises()
        elif name == "expand" or answer.numel() <= size:
            root = name in _ROOTS or (name == "pow" and math.isclose(abs(_exponent(args)), 0.5))
            self._statistics[id(answer)] = _Statistic(answer, is_root or root, size)

    def _normalises(self) -> None:
        if self._inside:
            self._found[id(self._inside[-1])] = self._inside[-1]


def _exponent(args: Sequence[Any]) -> float:
    return float(args[1]) if isinstance(args[1], int | float) else math.nan


TORCH_NORMS: tuple[type, ...] = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms of every number of axes
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    torch.nn.utils.parametrizations._SpectralNorm,
    torch.nn.utils.parametrizations._WeightNorm,
)


def norms_of(module: nn.Module) -> list[nn.Module]:
    """The normalisation layers that are torch's, or made from torch's."""
    return [part for part in module.modules() if isinstance(part, TORCH_NORMS)]
