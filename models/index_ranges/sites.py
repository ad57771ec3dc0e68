"""The sites where a graph of ATen operations indexes a table with integers: embedding, gather, index, scatter, one_hot.

An index out of range raises on a CPU. On a CUDA device it is a device-side assert, after which every later call fails.
Bodies of control flow are left out. Source: torch's CPU kernels, whose errors a test repeats.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..program import argument, look_of

MASKS = (torch.bool, torch.uint8)  # as an index these choose by truth, not by number


@dataclass(frozen=True, slots=True)
class Site:
    """``node`` reads ``index`` at ``place`` among its arguments (in a list: two places), to index a table.

    ``size`` is the table's, an expression where it is free, None where it is not known; then ``table`` has it along
    ``axis`` when the program runs (None: all its elements). ``negatives``: -1 is the last row.
    """

    node: Node
    place: tuple[int, ...]
    index: Node
    size: int | str | None
    table: Node | None = None
    axis: int | None = None
    negatives: bool = False


def index_sites(module: GraphModule) -> list[Site]:
    """Every site of the graph, in its order."""
    return [site for node in module.graph.nodes for site in _sites(node)]


def aten_name(node: Node) -> str:
    """``add`` for `aten.add.Tensor` and for `aten.add_.Tensor`; empty for a node that is not a call of ATen."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.name.startswith("aten::"):
        return ""
    name = schema.name.removeprefix("aten::")
    return name.removesuffix("_") if schema.is_mutable else name


def size_along(table: object, axis: int) -> int | str | None:
    """A size of a tensor: a number, the expression of a free one, or None where nothing is known."""
    look = look_of(table)
    if look is None or not -len(look.shape) <= axis < len(look.shape):
        return None
    size = look.shape[axis]
    return int(size) if size.isdecimal() else size


def _sites(node: Node) -> Iterator[Site]:
    name = aten_name(node)
    if name in _LISTS:
        yield from _listed(node)
    elif name == "one_hot":
        classes = argument(node, 1)
        if isinstance(classes, int) and classes > 0:
            yield Site(node, (0,), argument(node, 0), classes)
    elif (way := _WAYS.get(name)) is not None:
        axis = argument(node, way.dim) if way.dim is not None else way.axis
        yield from _site(node, (way.index,), argument(node, way.table), axis, way.negatives)


def _listed(node: Node) -> Iterator[Site]:
    """`index` and `index_put`: a list of tensors, one for a dimension each; a mask takes as many as it has."""
    axis = 0
    for number, index in enumerate(argument(node, 1)):
        look = look_of(index)
        is_mask = look is not None and look.dtype in MASKS
        if isinstance(index, Node) and not is_mask:
            yield from _site(node, (1, number), argument(node, 0), axis, True)
        axis += len(look.shape) if look is not None and is_mask else 1


def _site(
    node: Node, place: tuple[int, ...], table: Any, axis: int | None, negatives: bool
) -> Iterator[Site]:
    index: Any = argument(node, place[0])
    index = index[place[1]] if len(place) > 1 else index
    if not isinstance(index, Node) or not isinstance(table, Node):
        return
    if axis is None:
        look = look_of(table)
        known = look is not None and all(size.isdecimal() for size in look.shape)
        size = prod(int(one) for one in look.shape) if look is not None and known else None
    else:
        size = size_along(table, axis)
    yield Site(node, place, index, size, table, axis, negatives)


@dataclass(frozen=True, slots=True)
class _Way:
    """The places of a table, its index and its dimension among the arguments. Without ``dim`` the dimension is
    ``axis``; None: all elements."""

    table: int = 0
    index: int = 2
    dim: int | None = 1
    axis: int | None = None
    negatives: bool = False


_LISTS = ("index", "index_put", "_unsafe_index", "_unsafe_index_put")
_BAGS = ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
_ALONG = (
    *("gather", "index_select", "index_add", "index_copy", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
_WAYS = {
    **dict.fromkeys(_BAGS, _Way(index=1, dim=None, axis=0)),
    **dict.fromkeys(("take", "put"), _Way(index=1, dim=None, negatives=True)),
    "take_along_dim": _Way(index=1, dim=2),
    "index_fill": _Way(negatives=True),
    **dict.fromkeys(_ALONG, _Way()),
}
