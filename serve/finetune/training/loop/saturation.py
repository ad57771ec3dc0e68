"""A sigmoid or softmax in front of the loss, computed in FP32 whatever the precision. Needs torch alone.

In half a probability near 1 is 1: its slope is zero, the slope of a logarithm of what is left is infinite, and the row
is learnt from no more. torch refuses `binary_cross_entropy` under autocast for that; here the probability is computed
again, from the same scores in FP32, where the loss (or a cast to FP32 before it) takes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

_SATURATING = frozenset(
    (
        "sigmoid",
        "sigmoid_",
        "softmax",
        "_softmax",
        "log_softmax",
        "_log_softmax",
        "logsigmoid",
        "log_sigmoid",
        "softmin",
    )
)
_CASTS = frozenset(("to", "half", "bfloat16", "type", "type_as", "_to_copy"))
_FOLLOWED = frozenset(
    (
        "squeeze", "unsqueeze", "view", "reshape", "flatten", "permute", "transpose", "movedim", "select", "narrow",
        "contiguous", "clone", "__getitem__", "clamp", "clip", "clamp_min", "clamp_max", "log", "log1p", "neg", "stack",
        "cat", "concat", "chunk", "split", "unbind",
    )
)  # fmt: skip
_WITH_A_NUMBER = frozenset(("add", "sub", "rsub", "__add__", "__radd__", "__sub__", "__rsub__"))
_WIDENING = frozenset(("float", "double"))
_LOSSES = frozenset(
    (
        "binary_cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "cross_entropy",
    )
)
_Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


class Saturation:
    """Whether a loss needs it: found in its first forward. Later ones are followed only where it does, since to follow
    one takes time for each function that is called."""

    def __init__(self) -> None:
        self.needed: bool | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        if self.needed is False:
            yield
            return
        mode = _InFp32()
        with mode:
            yield
        self.needed = mode.was_needed


class _InFp32(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.was_needed = False
        # By the id of the answer, which is held so that no other tensor gets its id.
        self._made: dict[int, tuple[Tensor, _Call, Any]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "").partition(".")[0]
        if self._made and (name in _LOSSES or (name in _WIDENING | _CASTS and self._widens(args, given))):
            args, given = tree_map_only(Tensor, self._wide_if_made, (tuple(args), dict(given)))
        answer = func(*args, **given)
        if name in _SATURATING or (self._made and self._follows(name, args, given)):
            for place, one in enumerate(answer) if isinstance(answer, tuple | list) else [(None, answer)]:
                if one.is_floating_point():
                    self._made[id(one)] = one, (func, args, given), place
        return answer

    def _widens(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a cast of a half gives FP32."""
        wanted = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype | Tensor)]
        dtypes = [one.dtype if isinstance(one, Tensor) else one for one in wanted]
        return not _is_wide(args[0].dtype) and (not wanted or any(map(_is_wide, dtypes)))

    def _follows(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if not tree_any(lambda one: id(one) in self._made, (args, kwargs)):
            return False
        numbers = all(isinstance(one, int | float) or id(one) in self._made for one in args)
        return name in _FOLLOWED or name in _CASTS or (name in _WITH_A_NUMBER and numbers)

    def _wide_if_made(self, one: Tensor) -> Tensor:
        if id(one) not in self._made or _is_wide(one.dtype):
            return one
        self.was_needed = True
        return self._wide(one)

    def _wide(self, one: Tensor) -> Tensor:
        """The same tensor, computed in FP32 from what the saturating function was given."""
        if id(one) not in self._made:
            return one.float() if one.is_floating_point() else one
        _, (func, args, kwargs), place = self._made[id(one)]
        if getattr(func, "__name__", "").partition(".")[0] in _CASTS:
            return self._wide(args[0])
        wide_args, wide_kwargs = tree_map_only(Tensor, self._wide, (tuple(args), dict(kwargs)))
        with torch.autocast(one.device.type, enabled=False):
            answer = func(*wide_args, **wide_kwargs)
        return answer if place is None else answer[place]


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)
