"""Bounds for a program whose loops run, and whose values grow, as numbers in its inputs say: the same that a file has
(`onnx.bounded_answers`).

A conversion asks inputs that it made itself, and plants faults. Where a length is an exponential, one of them may ask
for more memory than any machine has, or for as many passes as a lifetime has. Every call of a run is counted, and its
result is sized before it is made. The bounds are counts, so they are the same on every machine.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from ...models.engines.arrays import to_torch
from ...models.errors import NotRun
from ...models.program import reads_sizes, walk
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..question import ELEMENTS_AT_LEAST, PASSES_AT_LEAST, REFUSALS, ROOM, Answers, Arrays
from .autocast.dtypes import tensors_of

_CALLS = 8  # times as many calls as any sample needs are still made; fewer than passes of a file, which take less time
_KINDS = 4096  # of calls whose size is remembered


@dataclass(frozen=True, slots=True)
class Bounds:
    """``calls`` of operations in one run, and ``elements`` of one of their results. ``known``: the sizes of results by
    kind of call."""

    model: str
    calls: int
    elements: int
    known: dict[Any, int] = field(default_factory=dict, compare=False, repr=False)

    def over(self, answers: Answers) -> Answers:
        """The answers, which raise NotRun for inputs that ask for more."""

        def answer(arrays: Arrays) -> dict[str, np.ndarray]:
            with self.held():
                return answers(arrays)

        return answer

    def held(self) -> AbstractContextManager[object]:
        """In this context the calls of this thread are counted, and are within the bounds."""
        return _Counting(self)


def within(bounds: Bounds | None, answers: Answers) -> Answers:
    return answers if bounds is None else bounds.over(answers)


def held(bounds: Bounds | None) -> AbstractContextManager[object]:
    return nullcontext() if bounds is None else bounds.held()


def bounds_of(module: GraphModule, spec: ModelSpec, samples: Samples) -> Bounds | None:
    """The bounds that hold what the samples need, with room; None for a program that reads no size from numbers.
    ``module``: as `models.program.runnable` gives it."""
    if not reads_sizes(module):
        return None
    most = _Counting(None)
    rows = min(spec.max_batch_size, samples.count) if spec.batched else 0  # a row alone needs no more
    for _, arrays in samples.batches(rows):
        most.calls = 0
        # A sample that is refused is reported by whoever asks it next.
        with suppress(*REFUSALS), torch.inference_mode(), most:
            module(*[to_torch(arrays[tensor.name].copy()) for tensor in spec.inputs])
        most.most_calls = max(most.most_calls, most.calls)
    return Bounds(
        spec.name,
        max(_CALLS * most.most_calls, PASSES_AT_LEAST * len(list(walk(module)))),
        max(ROOM * most.most_elements, ELEMENTS_AT_LEAST),
    )


class _Counting(TorchDispatchMode):
    """Counts the calls of operations, and the elements of the largest result; refuses those beyond ``bounds``."""

    supports_higher_order_operators = True

    def __init__(self, bounds: Bounds | None) -> None:
        super().__init__()
        self._bounds = bounds
        self.calls = self.most_calls = self.most_elements = 0
        self._known = bounds.known if bounds else {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*map(self._counted, args), **kwargs)
        self.calls += 1
        elements = self._elements(func, args, kwargs)
        self.most_elements = max(self.most_elements, elements)
        if (bounds := self._bounds) is not None:
            if self.calls > bounds.calls:
                raise self._refusal(bounds, f"makes more than {bounds.calls} calls of operations", _CALLS)
            if elements > bounds.elements:
                raise self._refusal(bounds, f"makes a value of {elements} elements", ROOM)
        return func(*args, **kwargs)

    def _elements(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        if (found := _said_by_values(func, args)) is not None:
            return found
        try:
            kind = (func, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
            if kind not in self._known:
                if len(self._known) == _KINDS:
                    self._known.clear()
                self._known[kind] = _sized(func, args, kwargs)
            return self._known[kind]
        except TypeError:  # an argument of a kind that has no hash
            return _sized(func, args, kwargs)

    def _counted(self, value: Any) -> Any:
        """A body of a loop or a branch, whose calls are counted too."""
        if not callable(value) or isinstance(value, Tensor):
            return value

        def run(*operands: Any) -> Any:
            with self:
                return value(*operands)

        return run

    @staticmethod
    def _refusal(bounds: Bounds, does: str, room: int) -> NotRun:
        return NotRun(
            f"'{bounds.model}' {does} with these inputs, more than {room} times as many as with any sample"
        )


def _kind(value: Any) -> Any:
    """The part of an argument that the size of a result depends on."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return value


def _said_by_values(func: OpOverload, args: Sequence[Any]) -> int | None:
    """The elements of a result whose size is in the numbers of an argument; None for any other operation."""
    name = func._schema.name
    if name == "aten::repeat_interleave" and isinstance(
        repeats := args[func._overloadname == "self_Tensor"], Tensor
    ):
        row = 1 if repeats is args[0] else args[0].numel() // max(repeats.numel(), 1)
        return int(repeats.sum()) * row
    if name == "aten::bincount":
        return int(args[0].max()) + 1 if args[0].numel() else 0
    return None


def _sized(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The elements that the result of a call would have: the call is made on tensors without numbers. 0 for a view, and
    where the size depends on numbers."""
    if func.is_view:
        return 0
    try:
        result = func(*map_aggregate(tuple(args), _meta), **map_aggregate(_on_meta(func, kwargs), _meta))
    except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
        return 0
    return max((tensor.numel() for tensor in tensors_of(result)), default=0)


def _on_meta(func: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    return {**kwargs, "device": torch.device("meta"), "pin_memory": None} if takes_device else kwargs


def _meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
