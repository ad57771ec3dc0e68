"""Finds the ops of a plan that have no half kernel on the device that the plan is for: they stay FP32. Finds the ops
that take no tensors of two dtypes together, too.

They are found by trying: each kind of op that would get half tensors runs once on the device, on the smallest tensors
that the program gives it. An op that fails in half and works in FP32 has no half kernel there. The result for one
device holds for no other.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate

from ....models.engines.cuda_graphs import scatters_and_adds
from ....models.program import writes_into_inputs
from ...graph.actions import Action, Kept
from .bodies import typed
from .dtypes import Dtypes, elements, sizes_unknown, tensors_of
from .plan import PrecisionPlan, make_plan
from .rewrite import Autocast

_Kind = tuple[OpOverload, tuple[torch.dtype, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Call:
    """A node's call as the plan has it, on fake tensors."""

    node: str
    op: OpOverload
    args: Any
    kwargs: Any

    def kind(self) -> _Kind:
        """Calls of one kind take the same kernel: op, dtypes and modes are equal."""
        words: list[str] = []
        map_aggregate((self.args, self.kwargs), lambda v: words.append(v) if isinstance(v, str) else None)
        dtypes = tuple(tensor.dtype for tensor in tensors_of((self.args, self.kwargs)))
        return self.op, dtypes, tuple(words)

    @property
    def op_name(self) -> str:
        return self.op._schema.name.removeprefix("aten::")

    def size(self) -> int:
        return sum(elements(tensor) for tensor in tensors_of((self.args, self.kwargs)))

    def mixed(self, half: torch.dtype, first: bool) -> "_Call":
        """The call with its first FP32 tensor in half and the others in FP32, or the other way round."""
        place = count()

        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dtype != torch.float32:
                return value
            return value.to(half) if (next(place) == 0) == first else value

        return replace(self, args=map_aggregate(self.args, cast), kwargs=map_aggregate(self.kwargs, cast))


class HalfKernels:
    """The half kernels of a device, with their known faults by kind of call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[_Kind, str] = {}
        self._refused: dict[_Kind, bool] = {}

    @property
    def of_loops(self) -> bool:
        """True if recurrent layers may be tried in half: only cuDNN computes them so."""
        return self.device.type == "cuda"

    def fault(self, call: _Call) -> str:
        """The device's own message why it cannot run calls of this kind in half; empty where it can."""
        kind = call.kind()
        if kind not in self._known:
            fault = self.raised(call, None)
            self._known[kind] = fault if fault and not self.raised(call, torch.float32) else ""
        return self._known[kind]

    def takes_one_dtype(self, call: _Call, half: torch.dtype) -> bool:
        """True if the device runs the call as it is, in FP32, refuses it with its first tensor in half, and refuses it
        with the others in half. False for a batch norm, which takes FP32 weights beside a half input."""
        mixed = [call.mixed(half, first) for first in (True, False)]
        kinds = [one.kind() for one in mixed]
        if any(kind not in self._refused for kind in kinds):
            runs = not self.raised(call, None)
            self._refused |= {
                kind: runs and bool(self.raised(one, None)) for kind, one in zip(kinds, mixed, strict=True)
            }
        return all(self._refused[kind] for kind in kinds)

    def raised(self, call: _Call, instead: torch.dtype | None) -> str:
        """The first line of what the call raises on the device; empty where it runs. ``instead``: of half tensors."""

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            wide = instead if value.dtype in (torch.float16, torch.bfloat16) else None
            return _example(value, wide or value.dtype, self.device)

        try:
            with torch.no_grad():
                call.op(*map_aggregate(call.args, real), **map_aggregate(call.kwargs, real))
        except (RuntimeError, NotImplementedError) as error:
            return _first_line(error)
        return ""


def _example(fake: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which are good indices; of floating point ones, with larger numbers on the diagonal of each matrix, so
    that it has an inverse and a root. A size that values decide is 1."""
    shape = [size if isinstance(size, int) else 1 for size in fake.shape]
    if not fake.is_floating_point():
        return torch.zeros(shape, dtype=dtype, device=device)
    made = torch.ones(shape, dtype=dtype, device=device)
    if made.ndim > 1:
        made.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return made


OF_CPU = HalfKernels(torch.device("cpu"))


@cache
def half_kernels(device: torch.device) -> HalfKernels:
    """The half kernels of a device, made once in a process."""
    return OF_CPU if device.type == "cpu" else HalfKernels(device)


def in_one_dtype(
    module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor], kernels: HalfKernels = OF_CPU
) -> PrecisionPlan:
    """The plan in which no op that follows its inputs is given tensors of two dtypes where it takes one alone: it reads
    them as its widest input, and where it writes into its first, as that one. Live autocast raises there.

    Whatever else the plan keeps in FP32, no such op fails: a search asks for many plans.
    """
    nothing = make_plan(module, replace(plan.precision, level="O0", keep=()))
    calls = _recorded(module, nothing, example).of_several.values()
    actions = {
        call.node: Action.FIRST if writes_into_inputs(call.op) else Action.WIDEST
        for call in calls
        if plan.actions[call.node] is Action.INPUT and kernels.takes_one_dtype(call, plan.dtype)
    }
    return replace(plan, actions={**plan.actions, **actions})


def keep_without_kernel(
    module: GraphModule,
    plan: PrecisionPlan,
    example: Sequence[Tensor],
    kernels: HalfKernels = OF_CPU,
    onnx: bool = False,
) -> PrecisionPlan:
    """The plan with every op in FP32 that has no half kernel on the device; with ``onnx``, in ONNX Runtime either.

    ``module`` is the prepared original, ``example`` one tensor per input. Call it before any other use of a plan: the
    dtypes of some ops without a kernel cannot be inferred. An FP32 result instead of a half one may lead to calls of
    another kind, so it is repeated until nothing changes.
    """
    while True:
        found = _recorded(module, plan, example)
        kinds: dict[_Kind, list[_Call]] = {}
        for call in found.calls.values():
            kinds.setdefault(call.kind(), []).append(call)
        kept = []
        for alike in kinds.values():
            fault = found.faults.get(alike[0].node) or kernels.fault(min(alike, key=_Call.size))
            reason = f"no half kernel on {kernels.device.type}"
            kept += [Kept(call.node, call.op_name, reason, fault) for call in alike if fault]
        if onnx:
            kept += [
                Kept(c.node, c.op_name, "no half kernel in ONNX Runtime", "it refuses a Scatter that reduces")
                for c in found.calls.values()
                # The call is, as ONNX, a Scatter that reduces, which ONNX Runtime refuses in half, but only when it
                # runs.
                if scatters_and_adds(c.op, c.args, c.kwargs) and all(c.node != other.node for other in kept)
            ]
        if not kept:
            return plan
        plan = plan.keeping(kept)


@dataclass(slots=True)
class _Found:
    """The calls that get half tensors, those that get several of floating point, and those that fail although nothing
    is computed."""

    calls: dict[str, _Call] = field(default_factory=dict)
    of_several: dict[str, _Call] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def _recorded(module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor]) -> _Found:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    given = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    found = _Found()
    # torch prints each failure, which is expected here.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True
    try:
        with mode, sizes_unknown(module), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _Recorder(module, plan, found).run(*given)
    finally:
        log.disabled = silent
    return found


class _Recorder(Autocast):
    """Carries a plan out on fake tensors and notes every call, but those that change their input: no plan can
    cast for them."""

    def __init__(self, module: GraphModule, plan: PrecisionPlan, found: _Found, prefix: str = "") -> None:
        super().__init__(module, plan, Dtypes(plan.dtype), prefix)
        self._found = found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            name = self._prefix + self._node.name
            if name not in self._found.calls:
                raise
            self._found.faults[name] = _first_line(error)
            args, kwargs = super().prepared(Action.FP32, target, args, kwargs)
            return target(*args, **kwargs)

    def prepared(self, action: Action, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = super().prepared(action, target, args, kwargs)
        name = self._prefix + self._node.name
        floats = [tensor.dtype for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
        if name in self._plan.actions and len(floats) > 1:
            self._found.of_several[name] = _Call(name, target, args, kwargs)
        if self._plan.dtype in floats and name in self._plan.actions and not target._schema.is_mutable:
            self._found.calls[name] = _Call(name, target, args, kwargs)
        return args, kwargs

    def _control_flow(self, node: Node, target: Any, args: Sequence[Any]) -> Any:
        def body(inner: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
            return _Recorder(inner, self._plan, self._found, prefix).run(*operands)

        return typed(node, args, self._prefix, body)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
