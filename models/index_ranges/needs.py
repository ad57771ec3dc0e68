"""The conditions on the inputs of a graph under which an index is in range: from the index back to the inputs.

Through every operation that has an inverse: views, casts, offsets, factors, clamps, constants chosen in place of some
values, columns. An index that is in range for all inputs (`spans.py`) gives no condition.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import GraphModule, Node

from ..program import dimensions_of, look_of
from ..spec import ModelSpec
from ..value_range import ValueRange
from .sites import Site, argument, aten_name, size_along
from .span import LARGEST, Span
from .spans import MANTISSA, argument_of_item, equal_sizes, limits_of, sizes_of, spans_of, written_over
from .value_bounds import COMPARISONS, MIRRORED, OPPOSITE, Bounds


class Needed(NamedTuple):
    """``bounds`` of inputs by node, all necessary; ``enough``: they are sufficient too."""

    bounds: list[tuple[Node, Bounds]]
    enough: bool


_NOTHING, _UNKNOWN = Needed([], True), Needed([], False)


class Needs:
    """``spec``: its sizes and ranges hold for the inputs; None: any inputs may come."""

    def __init__(self, module: GraphModule, spec: ModelSpec | None) -> None:
        self.spans = spans_of(module, spec)
        self.written = written_over(module)
        self.sizes, self.equal = sizes_of(module, spec), equal_sizes(module, spec)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.tensors = dict(zip(inputs, spec.inputs, strict=True)) if spec is not None else {}

    def proven(self, site: Site) -> bool:
        needed = self.of_site(site)
        return needed.enough and all(self.admitted(node, bounds) for node, bounds in needed.bounds)

    def admitted(self, node: Node, bounds: Bounds) -> bool:
        """Whether the spec lets nothing else in."""
        limits = limits_of(node)
        tensor = self.tensors.get(node)
        if tensor is None or limits is None:
            return False
        return bounds.admit(tensor.range or ValueRange((limits[0],), (limits[1],)))

    def of_site(self, site: Site) -> Needed:
        span = self.spans.get(site.index)
        if isinstance(site.size, int):
            low = -site.size if site.negatives else 0
            return self.of(site.index, Bounds.uniform(low, site.size - 1, dimensions_of(site.index)))
        named = self.equal.get(str(site.size), str(site.size))
        size = self.sizes.get(named, Span(0, LARGEST))
        if span is not None and span.low >= (-size.low if site.negatives else 0):
            if isinstance(site.size, str) and span.below.get(named, 1) <= 0:
                return _NOTHING
            if span.high < size.low:
                return _NOTHING
        if size.high >= LARGEST:
            return _UNKNOWN
        low = -size.high if site.negatives else 0
        bounds = Bounds.uniform(low, size.high - 1, dimensions_of(site.index))
        return Needed(self.of(site.index, bounds).bounds, False)  # the size of one request may be smaller

    def of(self, node: Node, bounds: Bounds) -> Needed:
        """The conditions on the inputs for a node's elements to be within ``bounds``."""
        limits = limits_of(node)
        span = self.spans.get(node)
        if span is not None and bounds.holds(span.low, span.high):
            return _NOTHING
        if node in self.written:
            return _UNKNOWN
        if limits is not None:
            bounds = bounds.clipped(*limits)
        if node.op == "placeholder":
            return Needed([(node, bounds)], limits is not None) if limits is not None else _UNKNOWN
        if node.target is operator.getitem:
            return self.of_part(node, bounds)
        rule = _RULES.get(aten_name(node))
        return rule(self, node, bounds) if rule is not None else _UNKNOWN

    def fixed(self, number: Any, bounds: Bounds) -> Needed:
        fits = isinstance(number, int | float) and bounds.holds(int(number), int(number))
        return _NOTHING if fits else _UNKNOWN

    def constant(self, value: Any) -> int | None:
        """A number, or the number that all elements of a tensor have; None for anything else."""
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return int(value)
        span = self.spans.get(value) if isinstance(value, Node) else None
        return span.low if span is not None and span.low == span.high else None

    # Movements.

    def same(self, node: Node, bounds: Bounds) -> Needed:
        """Each element of the first argument is in the result, at a place of its own or at several."""
        source, look = argument(node, 0), look_of(node)
        if look is None or look.dtype == torch.bool:
            return _UNKNOWN
        bits = MANTISSA.get(look.dtype)
        if bits is not None and not Bounds.uniform(-(1 << bits), 1 << bits, 1).around(bounds):
            return _UNKNOWN  # an integer may be rounded out of them
        if bounds.is_uniform:
            return self.of(source, _uniform_like(bounds, source))
        return self.of(source, bounds) if aten_name(node) in _COPIES else _UNKNOWN

    def permuted(self, node: Node, bounds: Bounds) -> Needed:
        source, rank = argument(node, 0), dimensions_of(argument(node, 0))
        name = aten_name(node)
        if bounds.is_uniform:
            return self.same(node, bounds)
        if name == "permute":
            order = [axis % rank for axis in argument(node, 1)]
        else:
            pair = (0, 1) if name == "t" else (argument(node, 1), argument(node, 2))
            order = list(range(rank))
            if rank > 1:
                one, other = pair[0] % rank, pair[1] % rank
                order[one], order[other] = order[other], order[one]
        return self.of(source, bounds.moved(lambda ends: ends.transpose(np.argsort(order))))

    def unsqueezed(self, node: Node, bounds: Bounds) -> Needed:
        if bounds.is_uniform:
            return self.same(node, bounds)
        axis = argument(node, 1) % dimensions_of(node)
        return self.of(argument(node, 0), bounds.moved(lambda ends: ends.take(0, axis)))

    def squeezed(self, node: Node, bounds: Bounds) -> Needed:
        if bounds.is_uniform or len(node.args) < 2 or not isinstance(argument(node, 1), int):
            return self.same(node, bounds)
        source = argument(node, 0)
        axis = argument(node, 1) % dimensions_of(source)
        if dimensions_of(source) == dimensions_of(node):
            return self.of(source, bounds)
        return self.of(source, bounds.moved(lambda ends: np.expand_dims(ends, axis)))

    def sliced(self, node: Node, bounds: Bounds) -> Needed:
        source, axis = argument(node, 0), argument(node, 1, 0)
        start, end, step = argument(node, 2), argument(node, 3), argument(node, 4, 1)
        look = look_of(source)
        if start in (None, 0) and step == 1 and look is not None and look_of(node) == look:
            return self.of(source, bounds)  # all of it
        size = size_along(source, axis)
        if not isinstance(size, int) or not all(
            part is None or type(part) is int for part in (start, end, step)
        ):
            return _UNKNOWN
        return self.cut(source, axis, size, range(size)[start:end:step], bounds)

    def selected(self, node: Node, bounds: Bounds) -> Needed:
        source, axis, place = (argument(node, index) for index in range(3))
        size = size_along(source, axis)
        if not isinstance(size, int) or not isinstance(place, int):
            return _UNKNOWN
        axis %= dimensions_of(source)
        return self.cut(source, axis, size, [place % size], _with_axis(bounds, node, axis))

    def of_part(self, node: Node, bounds: Bounds) -> Needed:
        """`unbind`, `split` and theirs; the values that `sort` gives."""
        source, which = argument_of_item(node)
        name, whole = aten_name(source), argument(source, 0)
        if name == "sort" and which == 0:
            return self.of(whole, _uniform_like(bounds, whole)) if bounds.is_uniform else _UNKNOWN
        if name == "unbind":
            axis = argument(source, 1, 0)
            size = size_along(whole, axis)
            if not isinstance(size, int):
                return _UNKNOWN
            return self.cut(whole, axis, size, [which], _with_axis(bounds, node, axis % dimensions_of(whole)))
        if name not in ("split", "split_with_sizes", "chunk"):
            return _UNKNOWN
        axis, sizes = argument(source, 2, 0), argument(source, 1)
        size = size_along(whole, axis)
        if not isinstance(size, int) or not (
            isinstance(sizes, int) or all(type(one) is int for one in sizes)
        ):
            return _UNKNOWN
        if name == "chunk":
            sizes = -(-size // sizes)
        start = sum(sizes[:which]) if not isinstance(sizes, int) else sizes * which
        width = sizes[which] if not isinstance(sizes, int) else sizes
        return self.cut(whole, axis, size, range(start, min(start + width, size)), bounds)

    def cut(self, source: Node, axis: int, size: int, places: Any, bounds: Bounds) -> Needed:
        limits = limits_of(source)
        rank = dimensions_of(source)
        kept = None
        if limits is not None and rank:
            kept = bounds.cut_out(axis % rank, size, places, *limits)
        return self.of(source, kept) if kept is not None else _UNKNOWN

    def joined(self, node: Node, bounds: Bounds) -> Needed:
        parts = argument(node, 0)
        if not bounds.is_uniform or not isinstance(parts, (list, tuple)):
            return _UNKNOWN
        needed = [self.of(part, _uniform_like(bounds, part)) for part in parts]
        return Needed([item for part in needed for item in part.bounds], all(part.enough for part in needed))

    def padded(self, node: Node, bounds: Bounds) -> Needed:
        if not bounds.is_uniform or any(type(one) is not int or one < 0 for one in argument(node, 1)):
            return _UNKNOWN
        if aten_name(node) == "pad" and argument(node, 2) != "constant":
            return self.of(argument(node, 0), bounds)
        value = argument(node, 2 if aten_name(node) == "constant_pad_nd" else 3)
        needed, fits = self.of(argument(node, 0), bounds), self.fixed(0 if value is None else value, bounds)
        return Needed(needed.bounds, needed.enough and fits.enough)

    # Arithmetic with constants. A tensor may be the constant: its other argument is then of the same rank or less.

    def added(self, node: Node, bounds: Bounds) -> Needed:
        name, one, other = aten_name(node), argument(node, 0), argument(node, 1)
        if name == "rsub":
            name, one, other = "sub", other, one
        if node.kwargs.get("alpha", 1) != 1:
            return _UNKNOWN
        if (number := self.constant(other)) is not None:
            return self.operand(one, bounds.before_adding(number if name == "add" else -number))
        if (number := self.constant(one)) is None:
            return _UNKNOWN
        if name == "add":
            return self.operand(other, bounds.before_adding(number))
        return self.operand(other, bounds.before_subtracting_from(number))

    def multiplied(self, node: Node, bounds: Bounds) -> Needed:
        for one, other in ((argument(node, 0), argument(node, 1)), (argument(node, 1), argument(node, 0))):
            if (factor := self.constant(other)) is not None:
                return self.operand(one, bounds.before_multiplying(factor))
        return _UNKNOWN

    def negated(self, node: Node, bounds: Bounds) -> Needed:
        return self.of(argument(node, 0), bounds.before_subtracting_from(0))

    def divided(self, node: Node, bounds: Bounds) -> Needed:
        mode = node.kwargs.get("rounding_mode") if aten_name(node) == "div" else "floor"
        divisor = self.constant(argument(node, 1))
        if divisor is None or mode is None:
            return _UNKNOWN
        return self.operand(argument(node, 0), bounds.before_dividing(divisor, mode == "floor"))

    def clamped(self, node: Node, bounds: Bounds) -> Needed:
        source, name = argument(node, 0), aten_name(node)
        if len(node.args) + len(node.kwargs) < 2:  # the largest of all
            return _UNKNOWN
        least = argument(node, 1) if name in ("clamp", "clamp_min", "maximum", "max") else None
        most = (
            argument(node, 2 if name == "clamp" else 1)
            if name in ("clamp", "clamp_max", "minimum", "min")
            else None
        )
        ends = [None if end is None else self.constant(end) for end in (least, most)]
        if any(given is not None and end is None for given, end in zip((least, most), ends, strict=True)):
            return _UNKNOWN
        limits = limits_of(source)
        if limits is None:
            return _UNKNOWN
        return self.operand(source, bounds.before_clamping(ends[0], ends[1], *limits))

    def chosen(self, node: Node, bounds: Bounds) -> Needed:
        """`where` and `masked_fill` with a constant in place of what a comparison with a number finds."""
        if aten_name(node) == "where":
            condition, one, other = (argument(node, place) for place in range(3))
        else:
            other, condition, one = (argument(node, place) for place in range(3))
        if self.constant(other) is not None:
            return self.replaced(condition, other, one, bounds, OPPOSITE)
        return self.replaced(condition, one, other, bounds, {name: name for name in OPPOSITE})

    def replaced(
        self, condition: Any, constant: Any, source: Any, bounds: Bounds, named: dict[str, str]
    ) -> Needed:
        """``where(condition, constant, source)``; ``named``: the comparison that the condition's name stands for."""
        number = self.constant(constant)
        comparison = aten_name(condition) if isinstance(condition, Node) else ""
        limits = limits_of(source)
        if (
            number is None
            or comparison not in COMPARISONS
            or limits is None
            or not bounds.holds(number, number)
        ):
            return _UNKNOWN
        compared, with_ = argument(condition, 0), argument(condition, 1)
        if with_ is source:
            compared, with_, comparison = with_, compared, MIRRORED[comparison]
        limit = self.constant(with_)
        if compared is not source or limit is None:
            return _UNKNOWN
        comparison = named[comparison]
        widened = bounds.before_choosing(comparison, limit, *limits)
        needed = self.operand(source, widened)
        return Needed(needed.bounds, needed.enough and _all_replaced(comparison, limit, bounds, widened))

    def operand(self, value: Any, bounds: Bounds | None) -> Needed:
        """The bounds for an argument whose shape may have been broadcast."""
        if bounds is None:
            return _NOTHING
        if not isinstance(value, Node):
            return self.fixed(value, bounds)
        rank = dimensions_of(value)
        if bounds.is_uniform:
            return self.of(value, _uniform_like(bounds, value))
        return self.of(value, bounds) if rank == bounds.low.ndim else _UNKNOWN


def _all_replaced(comparison: str, limit: int, bounds: Bounds, widened: Bounds) -> bool:
    """Whether every number that is within ``widened`` and not within ``bounds`` passes ``x <comparison> limit``."""
    if comparison == "ne":
        return bounds.holds(limit, limit)
    passes = COMPARISONS[comparison]
    below = zip(widened.low.ravel(), (bounds.low - 1).ravel(), strict=True)
    above = zip((bounds.high + 1).ravel(), widened.high.ravel(), strict=True)
    # Of each stretch its two ends: what passes has no gaps.
    return all(passes(low, limit) and passes(high, limit) for low, high in (*below, *above) if low <= high)


def _with_axis(bounds: Bounds, node: Node, axis: int) -> Bounds:
    """The bounds of a node without an axis, as those of its source, which has the axis."""
    if bounds.is_uniform:
        return bounds.uniform_of(dimensions_of(node) + 1)
    return bounds.moved(lambda ends: np.expand_dims(ends, axis))


def _uniform_like(bounds: Bounds, value: object) -> Bounds:
    return bounds.uniform_of(dimensions_of(value))


_COPIES = ("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy")
_Rule = Callable[[Needs, Node, Bounds], Needed]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_COPIES, Needs.same),
    **dict.fromkeys(
        (
            "view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "repeat",
            "tile", "repeat_interleave", "roll", "flip", "rot90", "expand", "expand_as", "broadcast_to", "movedim",
            "moveaxis", "swapaxes", "mT", "numpy_T",
        ),
        Needs.same,
    ),
    **dict.fromkeys(("permute", "transpose", "t"), Needs.permuted),
    "unsqueeze": Needs.unsqueezed, "squeeze": Needs.squeezed,
    "slice": Needs.sliced, "select": Needs.selected,
    "cat": Needs.joined, "concat": Needs.joined, "stack": Needs.joined,
    "constant_pad_nd": Needs.padded, "pad": Needs.padded,
    "add": Needs.added, "sub": Needs.added, "rsub": Needs.added, "mul": Needs.multiplied, "neg": Needs.negated,
    "floor_divide": Needs.divided, "div": Needs.divided,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min"), Needs.clamped),
    "where": Needs.chosen, "masked_fill": Needs.chosen,
}  # fmt: skip
