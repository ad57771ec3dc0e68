"""Casts where they move the fewest bytes: nodes that only move or choose values go to the cheaper side.

The same argument as for captured programs (`exporters/torch/autocast/placement.py`), on an ONNX graph: nodes that
compute keep their precision, no result changes, and a minimum cut (`exporters/graph/mincut.py`) decides. Bodies of If,
Loop and Scan stay as they are, and so do the values that are given to them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from onnx import NodeProto

from ...graph.mincut import Flow
from ...policy.classes import Trait, has
from ..reading.graph import BODIES, ForeignProgram, bodies, captured, walk
from .dtypes import Dtypes, Kind
from .kernels import Kernels
from .op_lists import Rule


def place(
    program: ForeignProgram,
    rules: Mapping[str, Rule],
    kernels: Kernels,
    dtypes: Dtypes,
    numel: Mapping[str, int],
    kept: Collection[str],
) -> Dtypes:
    """The dtypes with which the same half casts the fewest bytes. ``numel``: elements of each value; ``kept``: nodes
    that stay as they are."""
    reading = _Reading(program, rules, kernels, dtypes, numel, frozenset(kept))
    reading.read()
    flow = reading.flow
    free = flow.movable()
    if not free:
        return dtypes
    sides = flow.cut(free)
    placed = replace(dtypes, kinds=dict(dtypes.kinds), reads=dict(dtypes.reads), half=set(dtypes.half))
    for first in free:
        if sides[first] != flow.sides[first]:
            _move(placed, reading.free[first], sides[first])
    return placed


def _move(dtypes: Dtypes, node: NodeProto, half: bool) -> None:
    dtypes.reads[node.name] = dict.fromkeys(dtypes.reads[node.name], half)
    (dtypes.half.add if half else dtypes.half.discard)(node.name)
    for name in node.output:
        if name:
            dtypes.kinds[name] = Kind.HALF if half else Kind.FP32


@dataclass(slots=True)
class _Reading:
    """Reads the main graph once. A free node is called by its first output, its other outputs are tied to it."""

    program: ForeignProgram
    rules: Mapping[str, Rule]
    kernels: Kernels
    dtypes: Dtypes
    numel: Mapping[str, int]
    kept: frozenset[str]
    flow: Flow = field(default_factory=Flow)
    free: dict[str, NodeProto] = field(default_factory=dict)

    def read(self) -> None:
        graph = self.program.graph
        fixed = {name for node in graph.node for name in self.read_as_they_come(node)}
        free = [Trait.MOVES] if _distinguishes_signs_of_zero(self.program) else [Trait.MOVES, Trait.SELECTS]
        for name in self.program.weights:
            self.value(name, 0)
        for value in graph.input:
            self.value(value.name, self.numel.get(value.name, 1))
        for node in graph.node:
            for name in node.output:
                self.value(name, self.numel.get(name, 1))
            if has(node.op_type, *free) and fixed.isdisjoint(node.output) and self.is_free(node):
                self.add_free(node)
            elif not (node.op_type in BODIES and bodies(node)):
                self.add_reader(node)
                if node.op_type == "Cast" and self.dtypes.is_half(node.input[0]):
                    self.flow.rounded.update(name for name in node.output if name in self.flow.sides)
            else:
                for inner in (node, *(each for body in bodies(node).values() for each in walk(body))):
                    self.add_reader(inner)
        for value in graph.output:
            if value.name in self.flow.sides:
                self.reader(f"{value.name}\0output", [value.name], half=False)

    def value(self, name: str, numel: int) -> None:
        if name and self.program.is_float(name):
            self.flow.sides[name] = self.dtypes.is_half(name)
            self.flow.numel[name] = numel

    def read_as_they_come(self, node: NodeProto) -> set[str]:
        """The inputs that a node reads in any dtype; for a node with bodies, the values that they capture."""
        slots = self.dtypes.reads.get(node.name, {})
        sizes = has(node.op_type, Trait.SEES_SIZES)
        inner = {name for body in bodies(node).values() for name in captured(body)}
        return set() if sizes else inner | {n for slot, n in enumerate(node.input) if slot not in slots}

    def is_free(self, node: NodeProto) -> bool:
        """True if all floating values of a node are on one side, and could be on the other."""
        rule, reads = self.rules[node.name], self.dtypes.reads[node.name]
        outputs = [name for name in node.output if name]
        return (
            rule in (Rule.FOLLOW, Rule.HALF_IF_FED)
            and node.name not in self.kept
            and len(set(reads.values())) == 1
            and set(reads) == set(self.kernels.slots(node))
            and all(self.program.is_float(name) for name in outputs)
            and all(self.dtypes.is_half(name) in reads.values() for name in outputs)
            and not any(self.is_firm(node.input[slot]) for slot in reads)
        )

    def is_firm(self, name: str) -> bool:
        return name in self.program.weights and self.dtypes.kinds[name] == Kind.FP32

    def add_free(self, node: NodeProto) -> None:
        first, *others = (name for name in node.output if name)
        self.free[first] = node
        self.flow.transparent[first] = sum(self.flow.numel[name] for name in (first, *others))
        self.flow.tied.update(dict.fromkeys(others, first))
        self.flow.sources[first] = self.sources(node, self.dtypes.reads[node.name])

    def add_reader(self, node: NodeProto) -> None:
        reads = self.dtypes.reads.get(node.name, {})
        for half in (True, False):
            slots = [slot for slot, side in reads.items() if side == half]
            self.reader(f"{node.name}\0{half}", self.sources(node, slots), half)

    def sources(self, node: NodeProto, slots: Collection[int]) -> list[str]:
        found = dict.fromkeys(node.input[slot] for slot in slots)
        return [name for name in found if name in self.flow.sides]

    def reader(self, name: str, sources: list[str], half: bool) -> None:
        if sources:
            self.flow.sources[name], self.flow.reads[name] = sources, half


def _distinguishes_signs_of_zero(program: ForeignProgram) -> bool:
    """True if some op gives different answers for −0 and +0 (beyond the sign of a zero)."""
    for node in program.nodes:
        second = program.weights.get(node.input[1]) if len(node.input) > 1 else None
        computed = second is None or not second.size
        if node.op_type == "Reciprocal" or (node.op_type == "Div" and computed):
            return True
        if node.op_type == "Pow" and (computed or second is None or bool((second < 0).any())):
            return True
    return False
