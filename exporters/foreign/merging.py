"""FP32 regions that lie close together grow into one where that saves casts.

The search finds the fewest nodes in FP32; a half node between two of them costs a cast on either side. The rule:
a node (or two in a row) goes over to FP32 if at least as many casts go as nodes that compute come (those that only
move values do not count), if no more bytes are cast and moved than before, and if the judge still passes. Products
(convolutions, matrix products, recurrences) never do: half is worth most there, and their weights would double.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from ..autocast.mincut import BYTES_PER_CAST
from ..search.delta_debugging import Score
from .graph import FLOAT, HALVES, attribute
from .op_lists import LOWER
from .placement import MOVEMENTS
from .rewrite import HalfGraph

WRITTEN = 1 << 17  # nodes of all graphs that are written to try a step: 363 graphs of 361 nodes
OPERATIONS = 1 << 38  # for the judge
BYTES_MORE = 4  # an element that is read and written in FP32 instead of half
Write = Callable[[Collection[str]], HalfGraph]


@dataclass(frozen=True, slots=True)
class _Cost:
    casts: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Merging:
    """``write`` gives the half under a set of kept nodes, casts placed; ``numel``: elements of each value."""

    write: Write
    judge: Callable[[frozenset[str]], Score]
    numel: Mapping[str, int]
    may_be_kept: Collection[str]
    spent: Callable[[], int] = lambda: 0

    def grown(self, kept: Collection[str]) -> tuple[str, ...]:
        """The nodes to keep besides, in the order in which they were found, until `WRITTEN` or `OPERATIONS` end it.

        ``spent``: the operations of all runs of the judge so far.
        """
        found: list[str] = []
        failed, end = set[frozenset[str]](), self.spent() + OPERATIONS
        while True:
            graph = self.write([*kept, *found])
            step = self._step({*kept, *found}, graph, failed, end)
            if step is None:
                break
            found += step
        return tuple(found)

    def _step(
        self, kept: set[str], graph: HalfGraph, failed: set[frozenset[str]], end: int
    ) -> tuple[str, ...] | None:
        now, most = self.cost(graph), WRITTEN // len(graph.model.graph.node)
        for move in self._moves(graph, kept):
            computing = [node for node in move if node.op_type not in MOVEMENTS]
            more = BYTES_MORE * sum(self._elements(name, graph) for node in move for name in node.output)
            whole = frozenset({*kept, *(node.name for node in move)})
            if whole in failed:
                continue
            if len(failed) >= most or self.spent() > end:
                return None
            after = self.cost(self.write(whole))
            saved = now.casts - after.casts
            pays = saved >= max(1, len(computing)) and after.bytes + more <= now.bytes
            if pays and self.judge(whole).passed:
                return tuple(node.name for node in move)
            failed.add(whole)
        return None

    def _moves(self, graph: HalfGraph, kept: Collection[str]) -> Iterator[tuple[NodeProto, ...]]:
        """Half nodes beside a cast, then pairs of them: one, and one that reads it."""
        nodes = list(graph.model.graph.node)
        movable = {node.name for node in nodes if self._is_movable(node) and node.name not in kept}
        cast = {name for node in nodes if _is_cast(node) for name in (*node.input, *node.output)}
        beside = [n for n in nodes if n.name in movable and not cast.isdisjoint((*n.input, *n.output))]
        yield from ((node,) for node in beside)
        for node in beside:
            readers = [other for other in nodes if not set(other.input).isdisjoint(node.output)]
            yield from ((node, other) for other in readers if other.name in movable)

    def _is_movable(self, node: NodeProto) -> bool:
        return node.name in self.may_be_kept and node.op_type not in LOWER

    def cost(self, graph: HalfGraph) -> _Cost:
        names = [node.input[0] for node in graph.model.graph.node if _is_cast(node)]
        return _Cost(len(names), BYTES_PER_CAST * sum(self._elements(name, graph) for name in names))

    def _elements(self, name: str, graph: HalfGraph) -> int:
        return self.numel.get(graph.sources.get(name, name), 1)


def _is_cast(node: NodeProto) -> bool:
    return node.op_type == "Cast" and attribute(node, "to") in (FLOAT, *HALVES.values())
