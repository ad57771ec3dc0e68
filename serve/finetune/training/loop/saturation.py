"""A sigmoid, softmax or tanh in front of the loss, computed in FP32 whatever the precision. Needs torch alone.

In half a probability near 1 is 1: its slope is zero, the slope of a logarithm of what is left is infinite, and the row
is learnt from no more. torch refuses `binary_cross_entropy` under autocast for that; here the probability is computed
again, from the same scores in FP32, where the loss (or a cast to FP32 before it) takes it. A function that also stands
before losses without an infinite slope (tanh, exp) is left in half, unless a logarithm or its like takes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Names without the underscores of methods, operators and functions in place.
_PROBABILITIES = frozenset(
    ("sigmoid", "softmax", "log_softmax", "logsigmoid", "log_sigmoid", "softmin", "hardsigmoid")
)
_SATURATING = _PROBABILITIES | {"tanh", "erf", "exp", "expm1", "softplus"}
_STEEP = frozenset(
    (
        "log",
        "log1p",
        "log2",
        "log10",
        "logit",
        "atanh",
        "arctanh",
        "acos",
        "arccos",
        "asin",
        "arcsin",
        "xlogy",
    )
)
_CASTS = frozenset(("to", "half", "bfloat16", "type", "type_as", "to_copy", "float", "double"))
_FOLLOWED = _SATURATING | _STEEP | _CASTS | frozenset(
    (
        "squeeze", "unsqueeze", "view", "reshape", "flatten", "permute", "transpose", "movedim", "select", "narrow",
        "contiguous", "clone", "getitem", "gather", "where", "clamp", "clip", "clamp_min", "clamp_max", "stack", "cat",
        "concat", "chunk", "split", "unbind", "neg", "negative", "square", "sqrt", "pow", "reciprocal", "sum", "mean",
        "prod", "add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply", "div", "truediv", "rtruediv",
        "rdiv", "divide", "true_divide",
    )
)  # fmt: skip
_LOSSES = frozenset(
    (
        "binary_cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "cross_entropy",
    )
)  # fmt: skip


class _Made(NamedTuple):
    """A tensor and the call that gave it. ``tensor`` is held, so that no other one gets its id; ``state``: its
    `_state_of`. ``place``: among several answers of the call. ``is_narrow``: the tensor, or one that it was computed
    of, is a half. ``is_steep``: it must not stay rounded to half: it is, or comes from, a probability or logarithm."""

    tensor: Tensor
    state: tuple[Any, int]
    call: tuple[Callable[..., Any], Any, Any]
    place: int | None
    is_narrow: bool
    is_steep: bool


class Saturation:
    """Finds in the first forward if a loss needs a probability in FP32. The calls of later forwards are followed only
    where it does, since following them takes time for each function that is called."""

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
        self._made: dict[int, _Made] = {}  # by the id of the tensor
        self._in_fp32: dict[int, Tensor] = {}  # of those, what was computed again

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # fmt: skip
        call, written = (tuple(args), dict(kwargs or {})), getattr(func, "__name__", "").partition(".")[0]
        name = written.strip("_")
        if name in _SATURATING and (written.endswith(name + "_") or call[1].pop("inplace", False)):
            call = tree_map_only(Tensor, Tensor.clone, call)  # what it is given will be gone
            answer, func = func(*args, **(kwargs or {})), getattr(torch, name, func)
        else:
            if self._made and (name in _LOSSES or (name in _CASTS and self._widens(*call))):
                call = tree_map_only(
                    Tensor, lambda one: self._wide_if(one, name == "binary_cross_entropy"), call
                )
            answer = func(*call[0], **call[1])
        given = [one for one in tree_leaves(call) if isinstance(one, Tensor)]
        known = [made for one in given if (made := self._known(one)) is not None]
        if known and name in _STEEP and _is_wide(answer):
            wide = tree_map_only(Tensor, lambda one: self._wide_if(one, True), call)
            return func(*wide[0], **wide[1])
        if name in _SATURATING or (name in _FOLLOWED and known and self._only_made(given)):
            is_steep = name in _PROBABILITIES | _STEEP or any(one.is_steep for one in known)
            for place, one in enumerate(answer) if isinstance(answer, tuple | list) else [(None, answer)]:
                if isinstance(one, Tensor) and one.is_floating_point() and self._known(one) is None:
                    narrow = not _is_wide(one) or any(made.is_narrow for made in known)
                    self._in_fp32.pop(id(one), None)
                    self._made[id(one)] = _Made(
                        one, _state_of(one), (func, call[0], call[1]), place, narrow, is_steep
                    )
        return answer

    def _known(self, one: Tensor) -> _Made | None:
        """The record of this tensor; None where there is none, where the tensor was changed in place, or where a
        function of the model that has a backward of its own returned it."""
        made = self._made.get(id(one))
        return made if made is not None and made.state == _state_of(one) else None

    def _widens(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a cast, called with these arguments, turns a half into FP32."""
        wanted = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype | Tensor)]
        return not _is_wide(args[0]) and (not wanted or any(map(_is_wide, wanted)))

    def _only_made(self, given: Sequence[Tensor]) -> bool:
        return all(self._known(one) is not None for one in given if one.is_floating_point())

    def _wide_if(self, one: Tensor, is_steep: bool) -> Tensor:
        """The tensor ``one`` in FP32 if half is too coarse. ``is_steep``: the next function has an infinite slope."""
        made = self._known(one)
        if made is None or not made.is_narrow or not (is_steep or made.is_steep):
            return one
        self.was_needed = True
        return self._wide(one)

    def _wide(self, one: Tensor) -> Tensor:
        """The tensor ``one``, computed again in FP32 from the input of the saturating function: in a loop and not by
        recursion, for a chain of calls may be as long as a sequence."""
        left = [one]
        while left:
            made = self._known(left[-1])
            if made is None or id(left[-1]) in self._in_fp32:
                left.pop()
                continue
            given = [of for of in tree_leaves(made.call[1:]) if isinstance(of, Tensor) and self._known(of)]
            if missing := [of for of in given if id(of) not in self._in_fp32]:
                left += missing
            else:
                self._in_fp32[id(left.pop())] = self._again(made)
        return self._float(one)

    def _again(self, made: _Made) -> Tensor:
        func, args, kwargs = made.call
        if getattr(func, "__name__", "").partition(".")[0].strip("_") in _CASTS:
            return self._float(args[0])
        args, kwargs = tree_map_only(Tensor, self._float, (args, kwargs))
        with torch.autocast(made.tensor.device.type, enabled=False):
            answer = func(*args, **kwargs)
        return answer if made.place is None else answer[made.place]

    def _float(self, one: Tensor) -> Tensor:
        if not one.is_floating_point():
            return one
        return one.float() if self._known(one) is None else self._in_fp32[id(one)]


def _is_wide(value: Any) -> bool:
    dtype = value.dtype if isinstance(value, Tensor) else value
    return dtype in (torch.float32, torch.float64)


def _state_of(one: Tensor) -> tuple[Any, int]:
    """The node that computes the gradient of ``one``, and the count of its changes in place: −1 for a tensor made in
    inference mode, whose changes torch does not count."""
    return one.grad_fn, -1 if one.is_inference() else one._version
