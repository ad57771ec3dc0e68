"""Half precision without half kernels: an original program in FP32 storage, rounded wherever its plan has half.

A product that accumulates in FP32 and rounds once is what the kernels of a GPU do, and torch's elementwise
half kernels compute in FP32 too. On a CPU, true half convolutions are up to a hundred times slower. Another rounding
tells range from precision: a run that rounds the mantissa and keeps FP32's exponent has the error that no FP16
conversion can avoid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate, map_arg

from ....models.engines.arrays import floats_of, to_numpy
from ....models.program import writes_into_inputs
from ...graph.backend import Observe
from ...policy.weights import IN_RANGE
from .attention import attention
from .bodies import ran
from .dtypes import Dtypes, tensors_of
from .earlier_runs import EarlierRuns, Keys
from .folding import in_range

Rounding = Callable[[Tensor], Tensor]

WEIGHT_BYTES = 1 << 29  # of rounded weights that are held from run to run
_HALVES = (torch.float16, torch.bfloat16)
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DROPPED_BITS = {torch.float16: 13, torch.bfloat16: 16}  # of FP32's 23 bits of mantissa


def half_rounding(half: torch.dtype) -> Rounding:
    """Rounding as torch's ``.to(half)`` does it: nearest even, small numbers become subnormal or zero, large ones
    infinite."""
    return lambda tensor: tensor.to(half).float()


def mantissa_rounding(half: torch.dtype) -> Rounding:
    """The half's mantissa (nearest even) with FP32's exponent: rounding without a range."""
    bits = _DROPPED_BITS[half]

    def rounded(tensor: Tensor) -> Tensor:
        integers = tensor.contiguous().view(torch.int32)
        nearest = integers + ((1 << (bits - 1)) - 1) + ((integers >> bits) & 1)
        kept = (nearest & ~((1 << bits) - 1)).view(torch.float32)
        return torch.where(torch.isfinite(tensor), kept, tensor)

    return rounded


def _in_fp32(value: Any) -> Any:
    """An argument, FP32 in place of a half dtype. Asking a tensor whether it equals a dtype took half of each run."""
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value


@dataclass(frozen=True, slots=True)
class _Reading:
    """The arguments of a node as it reads them, the same in every run.

    ``args``, ``kwargs``: with FP32 in place of a half dtype. ``is_flat``: none of them is a list. ``rounds``: whether
    an FP32 value of a node is rounded: True, False: only one without dimensions, None: never.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_flat: bool
    rounds: Mapping[Node, bool | None]


@dataclass(slots=True)
class RoundedWeights:
    """Weights of a module as a half reads them, for all runs and all plans. ``room``: bytes that may still be held."""

    room: int = WEIGHT_BYTES
    held: dict[Node, Tensor] = field(default_factory=dict)


class Emulation(Interpreter):
    """Runs an original program (`models.program.runnable`, prepared) as its plan's half program would.

    ``tap`` sees every floating result, by the node's qualified name. Outputs are FP32 where they are half.
    ``opened``: attention in half rounds as the several nodes do that an ONNX file has for it. ``weights`` and
    ``earlier``: known from other emulations of the same module with the same rounding.
    """

    def __init__(
        self,
        module: GraphModule,
        dtypes: Dtypes,
        rounding: Rounding,
        tap: Observe | None = None,
        prefix: str = "",
        opened: bool = False,
        weights: RoundedWeights | None = None,
        earlier: EarlierRuns | None = None,
    ) -> None:
        super().__init__(module)
        self._dtypes, self._rounding, self._tap, self._prefix = dtypes, rounding, tap, prefix
        self._opened = opened
        self._rounded: dict[Node, Tensor] = {}  # a value that several nodes read in half is rounded once
        writes = any(writes_into_inputs(node.target) for node in module.graph.nodes)
        self._known = RoundedWeights(room=0) if writes else weights or RoundedWeights()
        self._readings: dict[Node, _Reading] = {}
        self._earlier = earlier if tap is None else None  # a tap sees every node
        self._keys: Keys = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._rounded, known = dict(self._known.held), dict(self._weights)
        if self._earlier is not None:
            self._keys = self._earlier.keys(self._decisions, args)
            known = {**self._earlier.values(self._keys), **known}
        return super().run(*args, initial_env=known, **kwargs)

    @cached_property
    def _decisions(self) -> dict[Node, bytes]:
        return {} if self._earlier is None else self._earlier.decisions(self._dtypes)

    @cached_property
    def _weights(self) -> dict[Node, Any]:
        assert isinstance(self.module, GraphModule)
        nodes = [node for node in self.module.graph.nodes if node.op == "get_attr"]
        return {node: self.fetch_attr(str(node.target)) for node in nodes}

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self._earlier is not None and n in self._keys:
            self._earlier.hold(self._keys[n], self.env)
        args, kwargs = self._read(n)
        if isinstance(n.target, HigherOrderOperator):
            result = ran(n, args, self._prefix, self._run_body)
        else:
            result = self._written(n, self._called(n, args, kwargs), args, kwargs)
        for last in self.user_to_last_uses.get(n, []):
            self._rounded.pop(last, None)
        if self._tap is not None:
            for tensor in tensors_of(result):
                if tensor.is_floating_point():
                    self._tap(self._prefix + n.name, floats_of(tensor))
        return result

    def _called(self, node: Node, args: Any, kwargs: Any) -> Any:
        if self._opened and node.target is _ATTENTION and self._dtypes.is_half(self._prefix + node.name):
            return attention(*args, **kwargs, rounding=self._rounding)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _run_body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        inner = Emulation(body, self._dtypes, self._rounding, self._tap, prefix, self._opened, self._known)
        return inner.run(*operands)

    def _read(self, node: Node) -> tuple[Any, Any]:
        """A node's arguments: rounded where it reads half, and FP32 in place of a half dtype argument."""
        reading = self._readings.get(node) or self._readings.setdefault(node, self._reading(node))
        rounds, env = reading.rounds, self.env

        def load(source: Any) -> Any:
            if not isinstance(source, Node):
                return source
            value, rule = env[source], rounds[source]
            if rule is None or not isinstance(value, Tensor) or value.dtype != torch.float32:
                return value
            return self._half(source, value) if rule or value.ndim == 0 else value

        if reading.is_flat:
            return tuple(map(load, reading.args)), {name: load(one) for name, one in reading.kwargs.items()}
        return map_arg((reading.args, reading.kwargs), load)

    def _reading(self, node: Node) -> _Reading:
        name = self._prefix + node.name
        reads = self._dtypes.reads.get(name, {})
        gives_half = self._dtypes.is_half(name) and not isinstance(node.target, HigherOrderOperator)
        compares = self._dtypes.out.get(name) == (torch.bool,) and self._dtypes.half in reads.values()

        def rounds(source: Node) -> bool | None:
            known = self._prefix + source.name
            if self._dtypes.half in self._dtypes.out.get(known, ()):
                return None  # was rounded when it was made
            if reads.get(known) == self._dtypes.half:
                return True
            # promotion takes a tensor without dimensions in the dtype of the others (so do a GPU's kernels; a
            # CPU's arithmetic reads it as a scalar in FP32, its comparisons do not)
            return False if compares or gives_half else None

        args, kwargs = map_aggregate((node.args, node.kwargs), _in_fp32)
        is_flat = not any(isinstance(one, tuple | list | dict | slice) for one in (*args, *kwargs.values()))
        return _Reading(args, kwargs, is_flat, {source: rounds(source) for source in node.all_input_nodes})

    def _half(self, source: Node, value: Tensor) -> Tensor:
        if source not in self._rounded:
            rounded = self._rounding(value)
            if IN_RANGE in source.meta:
                rounded = in_range(value, rounded.to(self._dtypes.half)).float()
            self._rounded[source] = rounded
            if source.op == "get_attr" and rounded.nbytes <= self._known.room:
                self._known.held[source] = rounded
                self._known.room -= rounded.nbytes
        return self._rounded[source]

    def _written(self, node: Node, result: Any, args: Any, kwargs: Any) -> Any:
        """A node's result, rounded where it is half; in place, where the op changes its input."""
        if writes_into_inputs(node.target):
            self._round_in_place(node, args, kwargs)
            self._rounded.clear()
            return result
        if not self._dtypes.is_half(self._prefix + node.name):
            return result
        halves = {t.untyped_storage()._cdata for t in self._half_inputs(node, args, kwargs)}
        known = self._dtypes.out[self._prefix + node.name]
        out = chain(known, repeat(known[-1]))  # other sizes may give more parts, as of a split

        def rounded(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            half = next(out) == self._dtypes.half and value.dtype == torch.float32
            return self._rounding(value) if half and value.untyped_storage()._cdata not in halves else value

        return map_aggregate(result, rounded)

    def _half_inputs(self, node: Node, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """Arguments that hold rounded numbers already: a view of them is rounded too."""
        reads = self._dtypes.reads.get(self._prefix + node.name, {})
        if any(dtype == torch.float32 for dtype in reads.values()):
            return iter(())
        return tensors_of((args, kwargs))

    def _round_in_place(self, node: Node, args: Any, kwargs: Any) -> None:
        assert isinstance(node.target, OpOverload)
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            source = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(source, Node) and self._dtypes.is_half(self._prefix + source.name):
                value.copy_(self._rounding(value))


_NO_FRACTION = 2.0**24  # from here on FP32 has whole numbers alone


class InDouble(Interpreter):
    """Runs an original program (`models.program.runnable`) with every FP32 tensor in FP64.

    A node without a kernel for FP64 runs in FP32. A result of 2²⁴ or more is rounded to FP32, which keeps no fraction
    beside it in whatever order it adds up: a score to which a mask adds −1e9 is gone in FP32, and FP64 would keep it.
    ``observe``: sees every floating result of the graph's own nodes.
    """

    def __init__(self, module: GraphModule, prefix: str = "", observe: Observe | None = None) -> None:
        super().__init__(module)
        self._prefix, self._observe = prefix, observe

    def run_node(self, n: Node) -> Any:
        result = self._ran(n)
        if self._observe and n.op == "call_function" and _is(result, torch.float64):
            self._observe(n.name, to_numpy(result))
        return result

    def _ran(self, n: Node) -> Any:
        if n.op != "call_function":
            return _widened(super().run_node(n)) if n.op != "output" else super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if isinstance(n.target, HigherOrderOperator):
            return ran(n, args, self._prefix, self._run_body)
        args, kwargs = map_aggregate((args, kwargs), _double_by_name)
        if n.target is torch.ops.aten.scaled_dot_product_attention.default:
            return attention(*args, **kwargs, rounding=_absorbed)  # its kernel adds the mask inside
        try:
            return map_aggregate(_widened(n.target(*args, **kwargs)), _absorbed)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError):
            args, kwargs = map_aggregate(self.fetch_args_kwargs_from_env(n), _narrowed)
            return _widened(n.target(*args, **kwargs))  # type: ignore[operator]

    def _run_body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        return InDouble(body, prefix).run(*operands)


def _double_by_name(value: Any) -> Any:
    return torch.float64 if value == torch.float32 and isinstance(value, torch.dtype) else value


def _widened(value: Any) -> Any:
    return map_aggregate(value, lambda one: one.double() if _is(one, torch.float32) else one)


def _absorbed(value: Any) -> Any:
    if not _is(value, torch.float64) or not bool((large := value.abs() >= _NO_FRACTION).any()):
        return value
    return torch.where(large, value.float().double(), value)


def _narrowed(value: Any) -> Any:
    return value.float() if _is(value, torch.float64) else value


def _is(value: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == dtype
