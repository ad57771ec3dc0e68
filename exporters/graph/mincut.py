"""The flow of values between nodes that run in half or FP32, and the cut through it with the fewest bytes cast.

As torch chooses what to recompute (``torch._functorch.partitioners``), by a minimum cut of networkx.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import networkx

BYTES_PER_CAST = 6  # per element: four read and two written, or the other way round
_HALF, _FP32 = True, False


@dataclass(slots=True)
class Flow:
    """The nodes' reads of values, each in half or FP32, in graph order. A side is True for half and False for FP32.

    ``sides``: value → the side that it is given on. ``numel``: elements of a value, 0 where its casts cost
    nothing. ``sources``: reader → the values that it reads. ``reads``: reader → the side that it reads them
    on, for those that may not change. ``transparent``: the other readers, which give the same numbers on both
    sides → elements that they copy. ``tied``: one of several results of a transparent node → that node.
    ``rounded``: FP32 values whose numbers half can all represent.
    """

    sides: dict[str, bool] = field(default_factory=dict)
    numel: dict[str, int] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    reads: dict[str, bool] = field(default_factory=dict)
    transparent: dict[str, int] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)

    def root(self, name: str) -> str:
        """The node whose side decides: for a piece of a split, the split."""
        return self.tied.get(name, name)

    def movable(self) -> list[str]:
        """The transparent nodes that may run on either side without changing a result.

        A node in FP32 is not free where its value is unrounded and reaches an FP32 reader unrounded; a node in half is
        not free where it rounds a value that reaches an FP32 reader.
        """
        unrounded, reaching, directly = self._unrounded(), self._reaching(), self._reaching(past_half=False)
        return [
            name
            for name in self.transparent
            if unrounded.isdisjoint(self.sources[name])
            or name not in (reaching if self.sides[name] == _HALF else directly)
        ]

    def cut(self, free: Sequence[str]) -> dict[str, bool]:
        """The sides with the fewest bytes cast; of those the fewest bytes moved; then the fewest changes."""
        moves = {name: 8 * self.transparent[name] for name in free}  # read and written in FP32, beyond half
        scale = 1 + sum(moves.values()) + len(moves)
        network = networkx.DiGraph()
        network.add_nodes_from((_HALF, _FP32))

        def at(name: str) -> str | bool:
            root = self.root(name)
            return root if root in moves else self.reads[root] if root in self.reads else self.sides[root]

        for value, readers in self._readers().items():
            place = self.root(value) if self.root(value) in moves else self.sides[value]
            capacity = BYTES_PER_CAST * self.numel[value] * scale
            _add_casts(network, value, place, {at(reader) for reader in readers}, capacity)
        for name, extra in moves.items():
            _add(network, _HALF, name, extra + self.sides[name])
            _add(network, name, _FP32, 1 - self.sides[name])
        half = networkx.minimum_cut(network, _HALF, _FP32)[1][0]
        return {n: self.root(n) in half if self.root(n) in moves else side for n, side in self.sides.items()}

    def cast_bytes(self, sides: Mapping[str, bool]) -> int:
        """Bytes that casts read and write; a tensor that several nodes read in another dtype is cast once."""
        return sum(
            BYTES_PER_CAST * self.numel[value]
            for value, readers in self._readers().items()
            if any((self.reads[r] if r in self.reads else sides[r]) != sides[value] for r in readers)
        )

    def _readers(self) -> dict[str, list[str]]:
        """The readers of each value whose casts cost something."""
        found: dict[str, list[str]] = {}
        for reader, sources in self.sources.items():
            for source in sources:
                if self.numel[source]:
                    found.setdefault(source, []).append(reader)
        return found

    def _unrounded(self) -> set[str]:
        """FP32 values that may hold what half does not represent."""
        found: set[str] = set()
        for name, side in self.sides.items():
            if (root := self.root(name)) in self.transparent:
                holds = not found.isdisjoint(self.sources[root])
            else:
                holds = name not in self.rounded
            if side == _FP32 and holds:
                found.add(name)
        return found

    def _reaching(self, past_half: bool = True) -> set[str]:
        """Nodes whose values reach an FP32 reader through transparent nodes, or through those in FP32 alone."""
        found: set[str] = set()
        for reader in reversed(self.sources):
            if reader in self.reads:
                reaches = self.reads[reader] == _FP32
            else:
                reaches = reader in found and (past_half or self.sides[reader] == _FP32)
            if reaches:
                found.update(self.root(source) for source in self.sources[reader])
        return found


def _add_casts(
    network: networkx.DiGraph, value: str, at: str | bool, readers: set[str | bool], capacity: int
) -> None:
    """One cast up if the value is half and any reader is FP32, one down if it is the other way round."""
    up, down = (value, "up"), (value, "down")
    _add(network, at, up, capacity)
    _add(network, down, at, capacity)
    for reader in readers:
        network.add_edge(up, reader)  # no capacity: infinite
        network.add_edge(reader, down)


def _add(network: networkx.DiGraph, one: object, other: object, capacity: int) -> None:
    known = network.edges[one, other]["capacity"] if network.has_edge(one, other) else 0
    network.add_edge(one, other, capacity=known + capacity)
