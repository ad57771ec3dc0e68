"""The way from an index of a graph of ATen operations back to the input that it is taken from.

Through views, casts among integers, constant offsets and columns. Constants and positions (``arange``) in place of an
input are in range or not whatever is sent. Everything else is left to the guard in the engine.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..program import argument, dimensions_of, look_of
from ..spec.spec import ModelSpec
from .sites import Site, aten_name, size_along
from .value_bounds import Bounds


class Condition(NamedTuple):
    """The site is in range exactly where the elements of ``input`` are within ``bounds``; None: it always is."""

    input: Node | None
    bounds: Bounds


_Step = tuple[Node, Bounds | None]  # a source, and what it must be within; None: that is not known


class Chains:
    """``spec``: its sizes hold for the inputs; None: inputs of any sizes may come."""

    def __init__(self, module: GraphModule, spec: ModelSpec | None) -> None:
        self.module, self.spec = module, spec
        self.written = _written_over(module)
        self.equal: dict[str, str] = {}  # free size → the one that stands for all equal ones
        self.largest: dict[str, int] = {}
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        first: dict[str, str] = {}
        for node, tensor in zip(inputs, spec.inputs, strict=True) if spec is not None else ():
            for axis, dim in enumerate(tensor.shape):
                size = size_along(node, axis)
                name = "(batch)" if spec is not None and spec.batched and axis == 0 else dim.name
                if isinstance(size, str):
                    self.equal[size] = first.setdefault(name or size, size)
                    if dim.maximum is not None:
                        self.largest[size] = dim.maximum

    def condition(self, site: Site) -> Condition | None:
        """The condition under which the site's index is in range; None where that is not known."""
        if not isinstance(site.size, int):
            counts = self._counted(site.index) == self.equal.get(str(site.size), site.size) is not None
            return Condition(None, Bounds.uniform(0, 0, 1)) if counts else None
        low = -site.size if site.negatives else 0
        bounds: Bounds | None = Bounds.uniform(low, site.size - 1, dimensions_of(site.index))
        node = site.index
        while bounds is not None and node not in self.written:
            limits = limits_of(node)
            if limits is None:
                return None
            if bounds.holds(*(self._values(node) or limits)):
                return Condition(None, bounds)
            bounds = bounds.clipped(*limits)
            if node.op == "placeholder":
                return Condition(node, bounds)
            node, bounds = self._source(node, bounds)
        return None

    def _values(self, node: Node) -> tuple[int, int] | None:
        """The ends of a constant, or of positions along an axis; None for everything else."""
        origin = self._origin(node)
        if (held := _held(self.module, origin)) is not None:
            return int(held.min()), int(held.max())
        start, count = _positions(origin)
        most = count if isinstance(count, int) else self.largest.get(str(count))
        return (start, start + max(most, 1) - 1) if start is not None and most is not None else None

    def _counted(self, node: Node) -> str | None:
        """The free size along which a node has the positions."""
        start, count = _positions(self._origin(node))
        return self.equal.get(count, count) if start == 0 and isinstance(count, str) else None

    def _origin(self, node: Node) -> Node:
        """The node of which all elements of this one are elements; this one itself where there is no other."""
        while node not in self.written and (limits_of(node) or (0, 0))[1] >= torch.iinfo(torch.int32).max:
            name = aten_name(node)
            if name in _OFFSETS:
                source, number = self._offset(node, name)
                if number != 0:
                    break
                node = source
            elif name in _SOURCES or name == "gather":
                node = argument(node, 0)
            else:
                break
        return node

    def _source(self, node: Node, bounds: Bounds) -> _Step:
        name = aten_name(node)
        if node.target is operator.getitem:
            return self._part(node, bounds)
        if name not in _SOURCES:
            return node, None
        source = argument(node, 0)
        if name in _OFFSETS:
            source, number = self._offset(node, name)
            if number is None:
                return node, None
            bounds = bounds.before_adding(number)
        if name in ("select", "slice"):
            return self._column(node, source, bounds)
        same_places = name not in _VIEWS and bounds.low.ndim == max(dimensions_of(source), 1)
        return source, bounds if same_places else bounds.of_rank(dimensions_of(source))

    def _column(self, node: Node, source: Node, bounds: Bounds) -> _Step:
        """The step back from a `select` or a `slice` to its source; its places along the axis may be fixed."""
        is_slice = aten_name(node) == "slice"
        axis = argument(node, 1, 0)
        ends = (
            [argument(node, 2), argument(node, 3), argument(node, 4, 1)] if is_slice else [argument(node, 2)]
        )
        size = size_along(source, axis)
        if is_slice and look_of(node) == look_of(source):  # all of it
            return source, bounds
        if not isinstance(size, int) or not all(one is None or type(one) is int for one in ends):
            return source, None
        return self._cut(source, axis, range(size)[slice(*ends)] if is_slice else [ends[0] % size], bounds)

    def _offset(self, node: Node, name: str) -> tuple[Any, int | None]:
        """The tensor that a constant is added to, and the constant; None where neither is one."""
        one, other = argument(node, 0), argument(node, 1)
        if node.kwargs.get("alpha", 1) != 1:
            return one, None
        if (number := self._number(other)) is not None:
            return one, number if name == "add" else -number
        return other, self._number(one) if name == "add" else None

    def _number(self, value: Any) -> int | None:
        """A whole number, or the one that all elements of a constant have."""
        if type(value) is int:
            return value
        held = _held(self.module, value)
        return int(held.min()) if held is not None and held.min() == held.max() else None

    def _part(self, node: Node, bounds: Bounds) -> _Step:
        """The step back from one of the columns of `unbind`, or of the parts of `split`, to the source."""
        source, which = node.args
        assert isinstance(source, Node) and isinstance(which, int)
        name, whole = aten_name(source), argument(source, 0)
        if name not in _PARTS:
            return node, None
        axis = argument(source, 1 if name == "unbind" else 2, 0)
        if name == "unbind":
            return self._cut(whole, axis, [which], bounds)
        size, width = size_along(whole, axis), argument(source, 1)
        if not isinstance(size, int) or not (
            isinstance(width, int) or all(type(one) is int for one in width)
        ):
            return node, None
        if isinstance(width, int):
            width = -(-size // width) if name == "chunk" else width
            places = range(size)[width * which : width * (which + 1)]
        else:
            places = range(sum(width[:which]), sum(width[: which + 1]))
        return self._cut(whole, axis, places, bounds)

    def _cut(self, source: Node, axis: int, places: Any, bounds: Bounds) -> _Step:
        size, limits, rank = size_along(source, axis), limits_of(source), dimensions_of(source)
        if limits is None or not isinstance(size, int):
            return source, None
        return source, bounds.along_new_axis(rank, axis % rank).cut_out(axis % rank, size, places, *limits)


def limits_of(value: object) -> tuple[int, int] | None:
    """The ends of a node's datatype, where that is of integers or truth values."""
    look = look_of(value)
    if look is None or look.dtype.is_floating_point or look.dtype.is_complex:
        return None
    if look.dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(look.dtype)
    return info.min, info.max


def _written_over(module: GraphModule) -> set[Node]:
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


def _positions(node: Node) -> tuple[int | None, int | str | None]:
    """The first of `arange`'s numbers, which grow by one, and how many there are: a number or an expression."""
    if aten_name(node) != "arange":
        return None, None
    has_start = "start" in node.target._schema.overload_name  # type: ignore[union-attr]
    start = node.args[0] if has_start else 0
    is_plain = type(start) is int and (len(node.args) < 3 or node.args[2] == 1)
    return (start if is_plain and type(start) is int else None), size_along(node, 0)


def _held(module: GraphModule, node: object) -> Tensor | None:
    """The constant of integers that a node names."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    found = operator.attrgetter(str(node.target))(module)
    if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex() or not found.numel():
        return None
    return found


_COPIES = {"to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach", "lift_fresh_copy"}
_VIEWS = {
    "view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "repeat", "expand",
    "expand_as", "broadcast_to", "movedim", "moveaxis", "swapaxes", "mT", "numpy_T", "permute", "transpose", "t",
    "unsqueeze", "squeeze",
}  # fmt: skip
_OFFSETS = {"add", "sub"}
_PARTS = {"unbind", "split", "split_with_sizes", "chunk"}
_SOURCES = _COPIES | _VIEWS | _OFFSETS | {"select", "slice"}
