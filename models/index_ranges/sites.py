"""Where a graph of ATen operations indexes a table with integers: embedding, gather, index, scatter, one_hot.

An index out of range raises on a CPU. On a CUDA device it is a device-side assert, after which every later call fails.
Bodies of control flow are left out. Source: torch's CPU kernels, whose errors a test repeats.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..program import look_of

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
    return [site for node in module.graph.nodes for site in _SITES.get(aten_name(node), _no_site)(node)]


def aten_name(node: Node) -> str:
    """``add`` for `aten.add.Tensor` and for `aten.add_.Tensor`; empty for a node that is not a call of ATen."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.name.startswith("aten::"):
        return ""
    name = schema.name.removeprefix("aten::")
    return name.removesuffix("_") if schema.is_mutable else name


def argument(node: Node, place: int, default: Any = None) -> Any:
    """An argument by its place in the schema, whether it was given by place or by name."""
    if place < len(node.args):
        return node.args[place]
    declared = node.target._schema.arguments[place]  # type: ignore[union-attr]
    return node.kwargs.get(declared.name, declared.default_value if default is None else default)


def size_along(table: object, axis: int) -> int | str | None:
    """A size of a tensor: a number, the expression of a free one, or None where nothing is known."""
    look = look_of(table)
    if look is None or not -len(look.shape) <= axis < len(look.shape):
        return None
    size = look.shape[axis]
    return int(size) if size.isdecimal() else size


def _no_site(node: Node) -> Iterator[Site]:
    yield from ()


def _rows(table: int, place: int) -> Callable[[Node], Iterator[Site]]:
    """The first dimension of argument ``table`` is indexed by argument ``place``."""

    def sites(node: Node) -> Iterator[Site]:
        yield from _site(node, (place,), argument(node, table), 0, False)

    return sites


def _along_dim(negatives: bool = False) -> Callable[[Node], Iterator[Site]]:
    """(table, dim, index, …)."""

    def sites(node: Node) -> Iterator[Site]:
        yield from _site(node, (2,), argument(node, 0), argument(node, 1), negatives)

    return sites


def _take_along_dim(node: Node) -> Iterator[Site]:
    yield from _site(node, (1,), argument(node, 0), argument(node, 2), False)


def _elements(node: Node) -> Iterator[Site]:
    yield from _site(node, (1,), argument(node, 0), None, True)


def _listed(node: Node) -> Iterator[Site]:
    """`index` and `index_put`: a list of tensors, one for a dimension each; a mask takes as many as it has."""
    axis = 0
    for number, index in enumerate(argument(node, 1)):
        look = look_of(index)
        is_mask = look is not None and look.dtype in MASKS
        if isinstance(index, Node) and not is_mask:
            yield from _site(node, (1, number), argument(node, 0), axis, True)
        axis += len(look.shape) if look is not None and is_mask else 1


def _one_hot(node: Node) -> Iterator[Site]:
    classes = argument(node, 1)
    if isinstance(classes, int) and classes > 0:
        yield Site(node, (0,), argument(node, 0), classes)


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


_SITES: dict[str, Callable[[Node], Iterator[Site]]] = {
    "embedding": _rows(0, 1),
    "embedding_bag": _rows(0, 1),
    "_embedding_bag": _rows(0, 1),
    "_embedding_bag_forward_only": _rows(0, 1),
    "index": _listed,
    "index_put": _listed,
    "_unsafe_index": _listed,
    "_unsafe_index_put": _listed,
    "take": _elements,
    "put": _elements,
    "take_along_dim": _take_along_dim,
    "one_hot": _one_hot,
    "index_fill": _along_dim(negatives=True),
    **dict.fromkeys(
        ("gather", "index_select", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add"),
        _along_dim(),
    ),
    "scatter_reduce": _along_dim(),
}
