"""Finds the values and the reads that are half, by a lattice over the graph and the bodies of If, Loop and Scan.

CONSTANT < HALF < FP32. A value that is computed from constants (and integers) alone is in FP32 but never makes a reader
FP32: it is cast where a reader is half. Loop-carried state is the join of the initial value and the body's output,
found as a fixed point.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from onnx import GraphProto, NodeProto, TensorProto

from ..reading.graph import BODIES, ForeignProgram, bodies
from .kernels import Kernels
from .op_lists import Rule


class Kind(IntEnum):
    CONSTANT = 0
    HALF = 1
    FP32 = 2


@dataclass(slots=True)
class Dtypes:
    """``kinds``: FP32 value of the original → its kind in the half. ``reads``: node → slot → whether it is read as
    half.

    ``half``: the nodes that compute in half. ``gives``: body (node, attribute) → per output half?, None where
    the output is no FP32 value of the original. ``back``: nodes whose FP32 results are cast to half.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    reads: dict[str, dict[int, bool]] = field(default_factory=dict)
    half: set[str] = field(default_factory=set)
    back: set[str] = field(default_factory=set)
    gives: dict[tuple[str, str], list[bool | None]] = field(default_factory=dict)

    def is_half(self, value: str) -> bool:
        return self.kinds.get(value) == Kind.HALF


def assign(
    program: ForeignProgram,
    rules: Mapping[str, Rule],
    kernels: Kernels,
    kept: Collection[str] = (),
    firm: Collection[str] = (),
) -> Dtypes:
    """Give every value its kind. ``kept`` nodes are FP32; ``firm`` values do not survive in half and stay FP32."""
    found = Dtypes()
    for name in program.weights:
        if program.is_float(name):
            found.kinds[name] = Kind.FP32 if name in firm else Kind.CONSTANT
    _Lattice(program, rules, kernels, frozenset(kept), frozenset(firm), found).main()
    return found


@dataclass(frozen=True, slots=True)
class _Lattice:
    program: ForeignProgram
    rules: Mapping[str, Rule]
    kernels: Kernels
    kept: frozenset[str]
    firm: frozenset[str]
    found: Dtypes

    def main(self) -> None:
        for value in self.program.graph.input:
            self.put(value.name, Kind.FP32)
        self.graph(self.program.graph)

    def put(self, name: str, kind: Kind) -> None:
        if name and self.program.is_float(name):
            firm = kind == Kind.CONSTANT and name in self.firm
            self.found.kinds[name] = Kind.FP32 if firm else kind

    def graph(self, graph: GraphProto) -> list[Kind | None]:
        for node in graph.node:
            if node.op_type in BODIES and bodies(node):
                {"If": self.branches, "Loop": self.loop, "Scan": self.scan}[node.op_type](node)
            else:
                self.plain(node)
        return [self.found.kinds.get(value.name) for value in graph.output]

    def plain(self, node: NodeProto) -> None:
        found, rule = self.found, self.rules[node.name]
        floats = {slot: found.kinds[name] for slot, name in enumerate(node.input) if name in found.kinds}
        half = self.computes_in_half(node, rule, floats)
        slots = self.kernels.slots(node) if half else ()
        as_is = rule is Rule.AS_IS or (node.op_type == "Cast" and node.name not in self.kept)
        found.reads[node.name] = {} if as_is else {slot: slot in slots for slot in floats}
        (found.half.add if half else found.half.discard)(node.name)
        back = half is False and rule is Rule.FP32_BACK and node.name not in self.kept
        (found.back.add if back else found.back.discard)(node.name)
        constant = all(kind == Kind.CONSTANT for kind in floats.values()) and self.yields(node, rule)
        results = self.kernels.outputs(node) if half and node.op_type != "Cast" else [half] * len(node.output)
        for name, is_half in zip(node.output, results, strict=True):
            in_half = is_half or (back and not constant)
            self.put(name, Kind.HALF if in_half else Kind.CONSTANT if constant else Kind.FP32)

    def yields(self, node: NodeProto, rule: Rule) -> bool:
        double = any(self.program.types.get(name) == TensorProto.DOUBLE for name in node.input)
        return node.name not in self.kept and rule is not Rule.ISLAND and not double

    def computes_in_half(self, node: NodeProto, rule: Rule, floats: Mapping[int, Kind]) -> bool:
        if node.name in self.kept:
            return False
        if node.op_type == "Cast":
            return rule is Rule.HALF
        slots = [kind for slot, kind in floats.items() if slot in self.kernels.slots(node)]
        if rule is Rule.HALF:
            return bool(slots)
        if rule is Rule.HALF_IF_FED:
            return any(kind != Kind.CONSTANT for kind in slots)
        fed = [kind for kind in slots if kind != Kind.CONSTANT]
        return rule is Rule.FOLLOW and bool(fed) and all(kind == Kind.HALF for kind in fed)

    def branches(self, node: NodeProto) -> None:
        """If: an output is the join of the branches' outputs."""
        given = {which: self.graph(body) for which, body in bodies(node).items()}
        joined = [self.join(kinds) for kinds in zip(*given.values(), strict=True)]
        self.close(node, joined, dict.fromkeys(given, joined))

    def loop(self, node: NodeProto) -> None:
        """Loop: a state is the join of its initial value and of the body's output for it."""
        self.carry(node, first=2, states=len(node.input) - 2, ahead=1)

    def scan(self, node: NodeProto) -> None:
        states = len(node.input) - next(
            entry.i for entry in node.attribute if entry.name == "num_scan_inputs"
        )
        self.carry(node, first=0, states=states, ahead=0)

    def carry(self, node: NodeProto, first: int, states: int, ahead: int) -> None:
        """``first``: the slot of the first state; ``ahead``: body outputs before the states (a condition)."""
        ((which, body),) = bodies(node).items()
        start: list[Kind | None] = [self.found.kinds.get(name) for name in node.input[first:]]
        while True:
            for value, kind in zip(body.input[first:], start, strict=False):
                if kind is not None:
                    self.put(value.name, kind)
            given = self.graph(body)
            state = [self.join(pair) for pair in zip(start[:states], given[ahead:], strict=False)]
            if state == start[:states]:
                break
            start[:states] = state
        results = [*state, *given[ahead + states :]]
        self.found.reads[node.name] = {
            first + slot: kind == Kind.HALF
            for slot, kind in enumerate(start)
            if kind is not None and node.input[first + slot]
        }
        self.close(node, results, {which: [*given[:ahead], *results]})

    def join(self, kinds: Sequence[Kind | None]) -> Kind | None:
        return (
            None if any(kind is None for kind in kinds) else max(kind for kind in kinds if kind is not None)
        )

    def close(
        self, node: NodeProto, results: Sequence[Kind | None], given: Mapping[str, Sequence[Kind | None]]
    ) -> None:
        """Note which outputs of a node's bodies, and of the node itself, are half."""
        self.found.reads.setdefault(node.name, {})
        for which, kinds in given.items():
            self.found.gives[node.name, which] = [
                None if kind is None else kind == Kind.HALF for kind in kinds
            ]
        for name, kind in zip(node.output, results, strict=False):
            if kind is not None:
                self.put(name, kind)
