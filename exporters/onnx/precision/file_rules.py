"""Finds the nodes of a foreign graph that stay in FP32 by list and by rule, each for its reason.

At O3 a constant that guards a division from zero need not be exact but must not vanish: it becomes half's least number.
A constant that stands for infinity becomes half's largest.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from ....models.errors import BadSetting
from ....models.folder.package import Precision
from ...graph.actions import Kept
from ...policy.classes import Trait, has
from ...policy.weights import Entry
from ...ranges.divisions import reaches_a_division
from ...ranges.ranges import Range
from ..reading.graph import FLOAT, FLOATING, ForeignProgram, attribute
from .dtypes import Dtypes, Kind, assign
from .kernels import Kernels
from .op_lists import Rule, rules
from .placement import place
from .profile import LARGEST
from .rewrite import HalfConstants, HalfGraph, rewrite

_LATER = {"Upsample": "Resize"}  # the conversion of opsets drops the node's name, and a file has not both
_MAY_BE_HALF = (Rule.HALF, Rule.FOLLOW, Rule.HALF_IF_FED)


@dataclass(slots=True)
class FileRules:
    """A level's rules applied to a file: the nodes they keep, with reasons, and the values that half cannot hold."""

    program: ForeignProgram
    precision: Precision
    search: bool = False
    rules: dict[str, Rule] = field(init=False)
    kernels: Kernels = field(init=False)
    ledger: HalfConstants = field(init=False)
    held: dict[str, Kept] = field(default_factory=dict)
    firm: dict[str, str] = field(default_factory=dict)  # value → why it does not survive
    # Node → why the rules would keep it: the search decides.
    doubts: dict[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernels = Kernels(self.program, self.precision.dtype)
        self.ledger = HalfConstants(self.program.weights, self.precision.dtype)
        self.rules = rules(self.program, self.precision)
        self._keep_what_was_asked()
        self._keep_what_has_no_kernel()

    @property
    def kept(self) -> tuple[Kept, ...]:
        return tuple(self.held.values())

    def assign(self, kept: Collection[str] = ()) -> Dtypes:
        return assign(self.program, self.rules, self.kernels, {*self.held, *kept}, self.firm)

    def rewritten(self, dtypes: Dtypes) -> HalfGraph:
        return rewrite(self.program, dtypes, self.ledger, self.precision.dtype)

    def placed(self, dtypes: Dtypes, kept: Collection[str]) -> Dtypes:
        """Dtypes that give the same answers as ``dtypes``, and cast the fewest bytes."""
        numel = {name: found.numel for name, found in self.ranges.items()}
        return place(self.program, self.rules, self.kernels, dtypes, numel, {*self.held, *kept})

    def halved(self, dtypes: Dtypes) -> list[str]:
        """The constants that half nodes read in half."""
        return sorted(
            {name for node in self.program.nodes for name in self._half_reads(node, dtypes)}
            & set(self.program.weights)
        )

    def hold_back(
        self,
        ranges: Mapping[str, Range],
        on_odd: Callable[[], Mapping[str, Range]],
        held: Mapping[str, str],
    ) -> None:
        """Keep the readers of values that half cannot hold: constants over budget, masks' sentinels.

        ``on_odd``: the ranges on adversarial inputs; ``held``: node → why it needs FP32 besides (a mask's sentinel).
        """
        self.ranges = ranges
        if self.precision.level == "O3":
            self._narrow(self._joined(on_odd()))
        half = self.assign().half
        for node in self.program.nodes:
            if node.name in held and node.name in half:
                self._hold(node, held[node.name])
        before, taken = self.assign(), self._taken()
        for node in self.program.nodes:
            for name in sorted(self._half_reads(node, before)):
                if name in self.program.weights:
                    self._weigh(node, self.ledger.entry(name))
                elif name in taken:
                    self.firm[name] = (
                        f"'{name}' is taken out of '{taken[name].weight}', which does not fit in half"
                    )
                    self._hold(node, self.firm[name], taken[name].evidence)
                elif before.kinds[name] == Kind.CONSTANT and self._overflows(name):
                    self.firm[name] = f"'{name}' reaches {self._size(name)}, beyond half's range"
                    self._hold(node, self.firm[name])

    def _joined(self, others: Mapping[str, Range]) -> dict[str, Range]:
        nothing = Range()
        names = {**self.ranges, **others}
        return {name: self.ranges.get(name, nothing).joined(others.get(name, nothing)) for name in names}

    def _narrow(self, ranges: Mapping[str, Range]) -> None:
        """Casts of small integers go to half at once; guards and infinities do not leave half's range."""
        for node in narrow_casts(self.program, self.rules, ranges, self.precision.dtype):
            self.rules[node.name] = Rule.HALF
        readers: dict[str, list[NodeProto]] = {}
        for node in self.program.nodes:
            for name in set(node.input):
                readers.setdefault(name, []).append(node)
        for name in filter(self.program.is_float, self.program.weights):
            entry = self.ledger.entry(name)
            if entry.saturated:
                brought = replaces_infinity(name, self.program, readers)
            else:
                brought = entry.over_budget and guards_a_division(name, readers)
            if brought:
                self.ledger.bring_into_range(name)

    def _weigh(self, node: NodeProto, entry: Entry) -> None:
        """Keep a node that reads a constant in half, where the constant does not fit."""
        searched = self.search and self.precision.level == "O3"
        if not entry.over_budget:
            return
        if not entry.keeps_its_readers(searched) or entry.weight in self.ledger.in_range:
            self.doubts.setdefault(node.name, entry.reason)
        elif self.rules[node.name] is Rule.FOLLOW:
            self.firm[entry.weight] = entry.reason  # as torch.autocast promotes
        else:
            self._hold(node, entry.reason, entry.evidence)

    def _taken(self) -> dict[str, Entry]:
        """The values that are taken out of a table of which half cannot hold every number (`Entry.is_wide`)."""
        found = dict[str, Entry]()
        weights = {
            name for name in self.program.weights if self.program.is_float(name)
        } - self.ledger.in_range
        for node in self.program.nodes:
            if has(node.op_type, Trait.COPIES) and node.input[0] in weights:
                is_larger = (
                    np.abs(self.program.weights[node.input[0]]).max(initial=0) > LARGEST[self.precision.dtype]
                )
                tables = [self.ledger.entry(node.input[0])] if is_larger else []
            else:
                tables = [
                    found[name] for name in node.input if name in found and has(node.op_type, Trait.MOVES)
                ]
            for name in node.output if tables and tables[0].is_wide else ():
                found[name] = tables[0]
        return found

    def _overflows(self, name: str) -> bool:
        return name in self.ranges and self.ranges[name].extreme > LARGEST[self.precision.dtype]

    def _size(self, name: str) -> str:
        return f"{self.ranges[name].extreme:.3g}"

    def _half_reads(self, node: NodeProto, dtypes: Dtypes) -> set[str]:
        reads = dtypes.reads.get(node.name, {})
        return {node.input[slot] for slot, half in reads.items() if half}

    def _hold(self, node: NodeProto, reason: str, evidence: str = "") -> None:
        self.held.setdefault(node.name, Kept(node.name, node.op_type, reason, evidence))

    def _keep_what_was_asked(self) -> None:
        for pattern in self.precision.keep:
            hits = [node for node in self.program.nodes if matches(node, pattern)]
            for node in hits or self._in_place_of(pattern):
                if self.rules.get(node.name) in _MAY_BE_HALF and self.precision.level != "O0":
                    self._hold(node, f"asked for by keep = {pattern!r}")

    def _in_place_of(self, pattern: str) -> list[NodeProto]:
        """The nodes that stand for those of the file that the pattern matches; none where all of them are folded or
        read by no output. Raises BadSetting where the file has no such node."""
        nodes = self.program.nodes
        asked = [node for node in self.program.given if matches(node, pattern)]
        if not asked:
            ops = sorted({node.op_type for node in nodes})
            names = [node.name for node in nodes][:10]
            raise BadSetting(
                f"keep = {pattern!r} matches no node: expected op:NAME (one of {ops}) or a node's name "
                f"({', '.join(names)}, …)"
            )
        made = {output for node in asked for output in node.output if output}
        # A node that is written out as several has its name in theirs before a dot, an inlined one before "__".
        names = tuple(node.name + ("." if node.output else "__") for node in asked if node.name)
        later = {_LATER.get(node.op_type) for node in asked}
        return [
            node
            for node in nodes
            if node.name.startswith(names) or not made.isdisjoint(node.output) or node.op_type in later
        ]

    def _keep_what_has_no_kernel(self) -> None:
        for node in self.program.nodes:
            if self.rules.get(node.name) not in _MAY_BE_HALF or node.op_type == "Cast":
                continue
            if reason := self.kernels.refusal(node):
                self.rules[node.name] = Rule.LEFT_ALONE
                if self.kernels.slots(node):
                    self._hold(node, reason)


def matches(node: NodeProto, pattern: str) -> bool:
    """``op:NAME`` (whatever its case), a node's name, or the name of the node in whose body it stands."""
    if pattern.startswith("op:"):
        return fnmatch.fnmatchcase(node.op_type.lower(), pattern[3:].lower())
    return bool(pattern) and (
        fnmatch.fnmatchcase(node.name, pattern) or node.name.startswith((f"{pattern}.", f"{pattern}/"))
    )


COUNTS = {"fp16": 512.0, "bf16": 64.0}  # half holds all integers up to four times as many


def guards_a_division(name: str, readers: Mapping[str, list[NodeProto]]) -> bool:
    """True if a constant is only added or chosen, and the result is a divisor."""

    def reading(result: str) -> Iterator[tuple[str, str, bool]]:
        for node in readers.get(result, []):
            divides = has(node.op_type, Trait.DIVIDES) and result in node.input[1:]
            for output in node.output:
                yield output, node.op_type, divides or node.op_type == "Reciprocal"

    nodes = readers.get(name, [])
    added = all(has(node.op_type, Trait.ADDS, Trait.FLOORS) for node in nodes)
    return added and any(reaches_a_division(node.output[0], reading) for node in nodes)


def replaces_infinity(name: str, program: ForeignProgram, readers: Mapping[str, list[NodeProto]]) -> bool:
    """True if a constant is the largest FP32 number and replaces infinities, as in nan_to_num."""
    array = program.weights[name]
    makers = {output: node for node in program.nodes for output in node.output}
    return bool((np.abs(array) == np.finfo(np.float32).max).all()) and all(
        node.op_type == "Where" and name != node.input[2] and _asks_for_infinity(node.input[0], makers)
        for node in readers.get(name, [])
    )


def _asks_for_infinity(name: str, makers: Mapping[str, NodeProto]) -> bool:
    node = makers.get(name)
    if node is None or node.op_type != "And":
        return node is not None and node.op_type == "IsInf"
    return any(_asks_for_infinity(each, makers) for each in node.input)


def narrow_casts(
    program: ForeignProgram, rules: Mapping[str, Rule], ranges: Mapping[str, Range], dtype: str
) -> Iterator[NodeProto]:
    """Casts of small integers (masks, counts, flags) to float, which may go to half directly."""
    for node in program.nodes:
        if node.op_type != "Cast" or rules.get(node.name) is not Rule.AS_IS or attribute(node, "to") != FLOAT:
            continue
        seen = ranges.get(node.output[0])
        counts = program.types.get(node.input[0]) not in FLOATING
        if counts and seen and not seen.infinite and seen.extreme <= COUNTS[dtype]:
            yield node
