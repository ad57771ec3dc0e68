"""Intervals of the integers of a graph that hold for all inputs: from constants, positions, argmax and clamps.

An interval (`span.py`) for each node of integers or truth values; one that ends below a free size of the program (the
place that argmax finds along a sequence) is known to do so by the size's expression.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..program import look_of
from ..spec import ModelSpec
from .sites import argument, aten_name, size_along
from .span import LARGEST, Span, constant

MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits


def limits_of(value: object) -> tuple[int, int] | None:
    """The ends of a node's datatype, where that is of integers or truth values."""
    look = look_of(value)
    if look is None:
        return None
    if look.dtype == torch.bool:
        return 0, 1
    if look.dtype.is_floating_point or look.dtype.is_complex:
        return None
    info = torch.iinfo(look.dtype)
    return info.min, info.max


def written_over(module: GraphModule) -> set[Node]:
    """The nodes whose memory an operation writes into: a view of it has the values that were written last."""
    owner: dict[Node, Node] = {}
    written: set[Node] = set()
    for node in module.graph.nodes:
        owner[node] = node
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        for place, declared in enumerate(schema.arguments if schema is not None else ()):
            given = argument(node, place)
            if declared.alias_info is None or not isinstance(given, Node):
                continue
            owner[node] = owner[given]
            if declared.alias_info.is_write and node.target is not torch.ops.aten.detach_.default:
                written.add(owner[given])
    return {node for node, first in owner.items() if first in written}


def equal_sizes(module: GraphModule, spec: ModelSpec | None) -> dict[str, str]:
    """Free size of an input → the one that is named for all equal ones: the batch, and dimensions of one name."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(inputs, spec.inputs, strict=True) if spec is not None else ():
        for axis, dim in enumerate(tensor.shape):
            size = size_along(node, axis)
            name = "(batch)" if spec is not None and spec.batched and axis == 0 else dim.name
            if isinstance(size, str) and name is not None:
                found[size] = first.setdefault(name, size)
    return found


def sizes_of(module: GraphModule, spec: ModelSpec | None) -> dict[str, Span]:
    """Free size → its span by the spec; without the batch."""
    found: dict[str, Span] = {}
    equal = equal_sizes(module, spec)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(inputs, spec.inputs, strict=True) if spec is not None else ():
        for axis, dim in enumerate(tensor.shape):
            size = size_along(node, axis)
            if isinstance(size, str) and not (spec is not None and spec.batched and axis == 0):
                size = equal.get(size, size)
                found[size] = Span(dim.minimum, LARGEST if dim.maximum is None else dim.maximum, {size: 1})
    return found


def spans_of(module: GraphModule, spec: ModelSpec | None) -> dict[Node, Span]:
    """The span of every node of the graph. ``spec``: its sizes and ranges hold for the inputs."""
    return _Spans(module, spec).found


class _Spans:
    def __init__(self, module: GraphModule, spec: ModelSpec | None) -> None:
        self.module = module
        self.found: dict[Node, Span] = {}
        self.written = written_over(module)
        self.sizes, self.equal = sizes_of(module, spec), equal_sizes(module, spec)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(inputs, spec.inputs, strict=True)) if spec is not None else {}
        for node in module.graph.nodes:
            if (span := self.span(node)) is not None:
                self.found[node] = span

    def span(self, node: Node) -> Span | None:
        limits = limits_of(node)
        if limits is None:  # a size, a number of floating point, or nothing of these
            name = aten_name(node)
            is_plain = name in _SAME_VALUES or name == "sym_size" or node.target in _ON_SIZES
            return self.known(node, name) if is_plain and node not in self.written else None
        found = self.known(node, aten_name(node)) if node not in self.written else None
        if found is None or found.low < limits[0] or found.high > limits[1]:
            return Span(*limits)  # it may have wrapped
        return found

    def known(self, node: Node, name: str) -> Span | None:
        if node.op == "placeholder":
            values = self.inputs[node].range if node in self.inputs else None
            return Span(min(values.low), max(values.high)) if values is not None else None
        if node.op == "get_attr":
            return _held(self.module, node)
        if node.target is operator.getitem:
            return self.one_of_several(node)
        if name in _SAME_VALUES:
            return self.passed(node)
        if name in _TRUTHS:
            return Span(0, 1)
        rule = _RULES.get(name) or _ON_SIZES.get(node.target)
        return rule(self, node) if rule is not None else None

    def of(self, node: Node, place: int) -> Span | None:
        """The bounds of an argument, which is a number, a size or a tensor."""
        return self.number(argument(node, place))

    def number(self, value: Any) -> Span | None:
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return constant(int(value))
        return self.found.get(value) if isinstance(value, Node) else None

    def size(self, table: object, axis: int) -> Span:
        """The bounds of the size of a dimension."""
        size = size_along(table, axis)
        if isinstance(size, int):
            return constant(size)
        if size is None:
            return Span(0, LARGEST)
        size = self.equal.get(size, size)
        return self.sizes.get(size, Span(0, LARGEST, {size: 1}))

    def passed(self, node: Node) -> Span | None:
        """Each element of the result is one of the first argument's."""
        span, look = self.of(node, 0), look_of(node)
        if span is None or look is None:
            return None
        bits = MANTISSA.get(look.dtype)
        return span if bits is None or max(-span.low, span.high) <= 1 << bits else None  # else rounded

    # Where something is.

    def places(self, node: Node, axis: Any) -> Span:
        """The places along an axis of the first argument."""
        return self.size(argument(node, 0), axis).places() if isinstance(axis, int) else Span(0, LARGEST)

    def arg_of_extreme(self, node: Node) -> Span:
        axis, look = argument(node, 1), look_of(argument(node, 0))
        return self.places(node, 0 if axis is None and look is not None and len(look.shape) == 1 else axis)

    def argsort(self, node: Node) -> Span:
        """Of `sort` too: the axis stands before or behind whether it is stable."""
        axes = [value for value in (*node.args[1:], node.kwargs.get("dim")) if type(value) is int]
        return self.places(node, axes[0] if axes else -1)

    def one_of_several(self, node: Node) -> Span | None:
        source, which = argument_of_item(node)
        name = aten_name(source)
        if name in _PARTS or (which == 0 and name in _WITH_PLACES):
            return self.of(source, 0)
        if which != 1 or name not in _WITH_PLACES:
            return None
        if name == "sort":
            return self.argsort(source)
        axis = argument(source, _WITH_PLACES[name])
        return self.places(source, axis if axis is not None else -1)

    def arange(self, node: Node) -> Span | None:
        has_start = "start" in node.target._schema.overload_name  # type: ignore[union-attr]
        start, end = (self.of(node, 0), self.of(node, 1)) if has_start else (constant(0), self.of(node, 0))
        step = node.args[2] if len(node.args) > 2 else 1
        if start is None or end is None or type(step) is not int or step <= 0:
            return None
        last = end.moved(-1)
        return Span(start.low, max(last.high, start.low), last.below)

    # Arithmetic.

    def of_two(self, node: Node, what: Callable[[Span, Span], Span | None]) -> Span | None:
        one, other = self.number(node.args[0]), self.number(node.args[1]) if len(node.args) > 1 else None
        return None if one is None or other is None else what(one, other)

    def added(self, node: Node) -> Span | None:
        factor = node.kwargs.get("alpha", 1)
        if aten_name(node) == "sub" or node.target is operator.sub:
            factor = -factor if isinstance(factor, int) else None
        if type(factor) is not int:
            return None
        return self.of_two(node, lambda one, other: one.plus(_times(other, factor)))

    def subtracted_from(self, node: Node) -> Span | None:
        return (
            self.of_two(node, lambda one, other: other.plus(one.negated())) if len(node.args) == 2 else None
        )

    def clamped(self, node: Node) -> Span | None:
        name, found = aten_name(node), self.of(node, 0)
        least = argument(node, 1) if name in ("clamp", "clamp_min") else None
        most = argument(node, 2 if name == "clamp" else 1) if name != "clamp_min" else None
        for end, pick in ((least, Span.larger), (most, Span.smaller)):
            if end is not None:
                bound = self.number(end)
                found = None if found is None or bound is None else pick(found, bound)
        return found

    def extreme(self, node: Node, pick: Callable[[Span, Span], Span]) -> Span | None:
        """Of two tensors, or of all elements of one."""
        return self.of(node, 0) if len(node.args) == 1 else self.of_two(node, pick)

    def divided(self, node: Node) -> Span | None:
        mode = node.kwargs.get("rounding_mode") if aten_name(node) == "div" else "floor"
        return self.of_two(node, lambda one, other: one.quotient(other, mode == "floor")) if mode else None

    def bits_of_both(self, node: Node) -> Span | None:
        known = [span for span in map(self.number, node.args[:2]) if span is not None and span.low >= 0]
        return Span(0, min(span.high for span in known)) if known else None

    def summed(self, node: Node) -> Span | None:
        each, axes = self.of(node, 0), argument(node, 1)
        axis = axes[0] if isinstance(axes, list | tuple) and len(axes) == 1 else axes
        return None if each is None or type(axis) is not int else each.summed(self.size(node.args[0], axis))

    # One of several.

    def any_of(self, values: Any) -> Span | None:
        spans = [self.number(value) for value in values]
        joined = spans[0] if spans else None
        for span in spans[1:]:
            joined = None if joined is None or span is None else joined.joined(span)
        return joined

    def padded(self, node: Node) -> Span | None:
        """`pad` has the way before the value, `constant_pad_nd` only the value."""
        is_plain = aten_name(node) == "constant_pad_nd"
        if not is_plain and argument(node, 2) != "constant":
            return self.of(node, 0)
        return self.any_of((argument(node, 0), argument(node, 2 if is_plain else 3) or 0))


def argument_of_item(node: Node) -> tuple[Node, int]:
    """The node of several results that a `getitem` reads, and which result it takes."""
    source, which = node.args
    assert isinstance(source, Node) and isinstance(which, int)
    return source, which


def _times(span: Span, factor: int) -> Span:
    return span if factor == 1 else span.times(constant(factor))


def _held(module: GraphModule, node: Node) -> Span | None:
    owner, _, name = str(node.target).rpartition(".")
    found = getattr(module.get_submodule(owner), name, None)
    if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex() or not found.numel():
        return None
    return Span(int(found.min()), int(found.max()))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME_VALUES = _names(
    """to _to_copy type_as view _unsafe_view reshape view_as reshape_as expand expand_as squeeze unsqueeze permute
    transpose t mT numpy_T movedim moveaxis swapaxes contiguous clone alias detach lift_fresh_copy flatten unflatten
    slice select narrow repeat tile repeat_interleave roll flip rot90 unfold index index_select gather take
    take_along_dim masked_select diagonal amax amin broadcast_to ravel"""
)
_TRUTHS = _names(
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite any all one_hot"
)
_PARTS = ("unbind", "split", "split_with_sizes", "chunk", "tensor_split")
# Ops that give values and their places, and which argument is the axis.
_WITH_PLACES = {
    "topk": 2, "sort": 1, "max": 1, "min": 1, "kthvalue": 2, "mode": 1, "median": 1, "cummax": 1, "cummin": 1,
}  # fmt: skip
_Rule = Callable[[_Spans, Node], Span | None]
_RULES: dict[str, _Rule] = {
    "argmax": _Spans.arg_of_extreme, "argmin": _Spans.arg_of_extreme, "argsort": _Spans.argsort,
    "arange": _Spans.arange, "sym_size": lambda spans, node: spans.size(node.args[0], argument(node, 1)),
    "add": _Spans.added, "sub": _Spans.added, "rsub": _Spans.subtracted_from,
    "mul": lambda spans, node: spans.of_two(node, Span.times),
    "neg": lambda spans, node: None if (span := spans.of(node, 0)) is None else span.negated(),
    "abs": lambda spans, node: None if (span := spans.of(node, 0)) is None else span.magnitude(),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _Spans.clamped),
    **dict.fromkeys(("maximum", "max"), lambda spans, node: spans.extreme(node, Span.larger)),
    **dict.fromkeys(("minimum", "min"), lambda spans, node: spans.extreme(node, Span.smaller)),
    "remainder": lambda spans, node: spans.of_two(node, Span.remainder),
    "floor_divide": _Spans.divided, "div": _Spans.divided,
    "bitwise_and": _Spans.bits_of_both, "__and__": _Spans.bits_of_both,
    "sum": _Spans.summed, "cumsum": _Spans.summed,
    **dict.fromkeys(("cat", "concat", "stack"), lambda spans, node: spans.any_of(argument(node, 0))),
    "where": lambda spans, node: spans.any_of(node.args[1:3]),
    "masked_fill": lambda spans, node: spans.any_of((node.args[0], argument(node, 2))),
    "scatter": lambda spans, node: spans.any_of((node.args[0], argument(node, 3))),
    "pad": _Spans.padded, "constant_pad_nd": _Spans.padded,
    **dict.fromkeys(("full", "full_like"), lambda spans, node: spans.of(node, 1)),
    "new_full": lambda spans, node: spans.of(node, 2), "scalar_tensor": lambda spans, node: spans.of(node, 0),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda spans, node: constant(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda spans, node: constant(1)),
}  # fmt: skip
_ON_SIZES: dict[Any, _Rule] = {
    operator.add: _Spans.added, operator.sub: _Spans.added,
    operator.mul: lambda spans, node: spans.of_two(node, Span.times),
    operator.floordiv: lambda spans, node: spans.of_two(node, lambda one, other: one.quotient(other, True)),
    operator.mod: lambda spans, node: spans.of_two(node, Span.remainder),
}  # fmt: skip
