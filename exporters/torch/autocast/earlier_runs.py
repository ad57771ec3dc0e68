"""The values of earlier runs of a module's halves: a run on the same inputs goes on where its plan begins to differ.

A search for kept nodes asks hundreds of plans on the same samples, and many differ in late nodes alone. Values that are
taken over are those that the run itself would compute, bit for bit: nothing of a plan or of a verdict changes.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from ....models.program import writes_into_inputs
from .dtypes import Dtypes, tensors_of

BYTES = 1 << 29  # of the values that are held
PLACES = 16  # of a graph, at which they are held

Values = dict[Node, Any]
Keys = dict[Node, bytes]


@dataclass
class EarlierRuns:
    """The values of earlier runs at some places of ``module``'s graph, by inputs and decisions so far (`keys`).

    Held are at most `BYTES`, the last used ones. A graph that writes into values or has control flow has no places. One
    that draws numbers is never planned (`proof/no_reference.py`).
    """

    module: GraphModule
    held: dict[bytes, tuple[Values, int]] = field(default_factory=dict)
    _size: int = 0

    @cached_property
    def _places(self) -> dict[Node, list[Node]]:
        """Each place with the nodes that run before it: of each part of the graph where the fewest values are live."""
        nodes = list(self.module.graph.nodes)
        if any(
            isinstance(one.target, HigherOrderOperator) or writes_into_inputs(one.target) for one in nodes
        ):
            return {}
        number = {node: index for index, node in enumerate(nodes)}
        live = [0] * len(nodes)  # values that are there before each node runs, weights left out
        for node in nodes:
            last = max(map(number.__getitem__, node.users), default=0) if node.op != "get_attr" else 0
            for index in range(number[node] + 1, last + 1):
                live[index] += 1
        called = [index for index, node in enumerate(nodes) if node.op == "call_function"]
        size = -(-len(called) // PLACES) or 1
        parts = (called[start : start + size] for start in range(0, len(called), size))
        found = (min(part, key=lambda index: (live[index], -index)) for part in parts)
        return {nodes[index]: nodes[:index] for index in found if index > called[0]}

    def decisions(self, dtypes: Dtypes) -> dict[Node, bytes]:
        """A digest for each place: of what a plan decides for all nodes before."""
        found, digest = dict[Node, bytes](), hashlib.blake2b(digest_size=16)
        for node in self.module.graph.nodes if self._places else ():
            if node in self._places:
                found[node] = digest.digest()
            digest.update(repr((dtypes.reads.get(node.name), dtypes.out.get(node.name))).encode())
        return found

    def keys(self, decisions: Mapping[Node, bytes], inputs: Sequence[Any]) -> Keys:
        """The key of each place in a run on these inputs."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in tensors_of(inputs) if decisions else ():
            digest.update(repr((tensor.dtype, tensor.shape, tensor.stride())).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return {place: digest.digest() + before for place, before in decisions.items()}

    def values(self, keys: Keys) -> Values:
        """The values that a run need not compute: those at the latest place that is held, None where it reads none."""
        for place, key in reversed(keys.items()):
            if key in self.held:
                return {**dict.fromkeys(self._places[place]), **self.held[key][0]}
        return {}

    def hold(self, key: bytes, values: Values) -> None:
        """Hold a run's values at a place, as they are before its node runs; weights are the module's own."""
        known = self.held.pop(key, None)
        if known is None:
            own = {
                node: value for node, value in values.items() if node.op != "get_attr" and value is not None
            }
            known = own, sum(_bytes(own))
        else:
            self._size -= known[1]
        self.held[key] = known
        self._size += known[1]
        while self._size > BYTES:
            self._size -= self.held.pop(next(iter(self.held)))[1]

    def forget(self) -> None:
        self.held.clear()
        self._size = 0


def _bytes(values: Values) -> Iterator[int]:
    storages = {
        one.untyped_storage()._cdata: one.untyped_storage() for one in tensors_of(tuple(values.values()))
    }
    return (storage.nbytes() for storage in storages.values())
