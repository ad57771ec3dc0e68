"""Which nodes of a foreign graph stay in FP32 by list and by rule, each for its reason."""

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto

from ...models.errors import BadSetting
from ...models.package import Precision
from ..autocast.plan import Kept
from ..ranges.ranges import Range
from .dtypes import Dtypes, Kind, assign
from .graph import ForeignProgram, graphs
from .harmless_losses import guards_a_division, may_be_lost, narrow_casts, replaces_infinity
from .kernels import Kernels
from .op_lists import Rule, rules
from .placement import place
from .profile import LARGEST
from .rewrite import HalfGraph, rewrite
from .weights import HalfConstants

_MAY_BE_HALF = (Rule.HALF, Rule.FOLLOW, Rule.HALF_IF_FED)


@dataclass(slots=True)
class FileRules:
    """A level's rules applied to a file: the nodes they keep, with reasons, and the values that half cannot hold."""

    program: ForeignProgram
    precision: Precision
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
        """The same answers, with the fewest bytes cast."""
        numel = {name: found.numel for name, found in self.ranges.items()}
        return place(self.program, self.rules, self.kernels, dtypes, numel, {*self.held, *kept})

    def halved(self, dtypes: Dtypes) -> list[str]:
        """The constants that half nodes read in half."""
        return sorted(
            {name for node in self.program.nodes for name in self._half_reads(node, dtypes)}
            & set(self.program.weights)
        )

    def hold_back(self, ranges: Mapping[str, Range], on_odd: Callable[[], Mapping[str, Range]]) -> None:
        """Keep the readers of values that half cannot hold: constants over budget, masks' sentinels.

        Where all is to be half (O3), values that are lost without overflow are left to the search. ``on_odd``: the
        ranges on adversarial inputs.
        """
        self.ranges = ranges
        everywhere = self._joined(on_odd()) if self.precision.level == "O3" else {}
        for node in narrow_casts(self.program, self.rules, everywhere, self.precision.dtype):
            self.rules[node.name] = Rule.HALF
        before = self.assign()
        readers = self._readers()
        spared = self._before_fp32(before, readers)
        for node in self.program.nodes:
            for name in sorted(self._half_reads(node, before)):
                reason = self._does_not_survive(name, before)
                if reason and everywhere and self._may_be_lost(node, name, readers, everywhere):
                    self.doubts.setdefault(node.name, reason)
                elif reason and all(reader.name in spared for reader in readers[name]):
                    self.firm[name] = reason
                elif reason:
                    self._hold(node, reason)
        half = self.assign().half
        for node in self.program.nodes:
            for name in node.output if node.name in half else ():
                if self._is_sentinel(name):
                    self._hold(node, f"'{name}' holds a sentinel ({self._size(name)}), which half has not")

    def _joined(self, others: Mapping[str, Range]) -> dict[str, Range]:
        nothing = Range()
        names = {**self.ranges, **others}
        return {name: self.ranges.get(name, nothing).joined(others.get(name, nothing)) for name in names}

    def _may_be_lost(
        self,
        node: NodeProto,
        name: str,
        readers: Mapping[str, list[NodeProto]],
        ranges: Mapping[str, Range],
    ) -> bool:
        if name not in self.program.weights:
            return False
        if guards_a_division(name, readers):
            self.ledger.bring_into_range(name)
        elif replaces_infinity(name, self.program, readers):
            self.ledger.bring_into_range(name)
            return True
        return may_be_lost(node, self.ledger.entry(name), readers, ranges, self.precision.dtype)

    def _readers(self) -> dict[str, list[NodeProto]]:
        found: dict[str, list[NodeProto]] = {}
        for node in self.program.nodes:
            for name in set(node.input):
                found.setdefault(name, []).append(node)
        return found

    def _before_fp32(self, dtypes: Dtypes, readers: Mapping[str, list[NodeProto]]) -> set[str]:
        """Nodes that follow an FP32 input, by autocast's lists, and have only FP32 readers.

        There an FP32 input adds almost no FP32 work: the cast is before them, not after them.
        """
        found: set[str] = set()
        outputs = {value.name for graph in graphs(self.program.graph) for value in graph.output}
        for node in reversed(self.program.nodes):
            after = [(each, name) for name in node.output for each in readers.get(name, [])]
            follows = self.rules.get(node.name) is Rule.FOLLOW and outputs.isdisjoint(node.output)
            if follows and after and all(e.name in found or _in_fp32(e, name, dtypes) for e, name in after):
                found.add(node.name)
        return found

    def _does_not_survive(self, name: str, dtypes: Dtypes) -> str | None:
        constant = name in self.program.weights
        reason = self.ledger.fault(name) if constant else None
        if not constant and self._is_sentinel(name):
            reason = f"'{name}' holds a sentinel ({self._size(name)}), which half has not"
        elif not constant and dtypes.kinds[name] == Kind.CONSTANT and self._overflows(name):
            reason = f"'{name}' reaches {self._size(name)}, beyond half's range"
        if reason and not constant:
            self.firm[name] = reason
        return reason

    def _is_sentinel(self, name: str) -> bool:
        return self._overflows(name) and self.ranges[name].sentinels > 0

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
            if not hits:
                ops = sorted({node.op_type for node in self.program.nodes})
                names = [node.name for node in self.program.nodes][:10]
                raise BadSetting(
                    f"keep = {pattern!r} matches no node: expected op:NAME (one of {ops}) or a node's name "
                    f"({', '.join(names)}, …)"
                )
            for node in hits:
                if self.rules.get(node.name) in _MAY_BE_HALF and self.precision.level != "O0":
                    self._hold(node, f"asked for by keep = {pattern!r}")

    def _keep_what_has_no_kernel(self) -> None:
        for node in self.program.nodes:
            if self.rules.get(node.name) not in _MAY_BE_HALF or node.op_type == "Cast":
                continue
            if reason := self.kernels.refusal(node):
                self.rules[node.name] = Rule.LEFT_ALONE
                if self.kernels.slots(node):
                    self._hold(node, reason)


def _in_fp32(node: NodeProto, name: str, dtypes: Dtypes) -> bool:
    reads = dtypes.reads.get(node.name, {})
    return all(reads.get(slot) is False for slot, read in enumerate(node.input) if read == name)


def matches(node: NodeProto, pattern: str) -> bool:
    """``op:NAME`` (whatever its case), a node's name, or the name of the node in whose body it stands."""
    if pattern.startswith("op:"):
        return fnmatch.fnmatchcase(node.op_type.lower(), pattern[3:].lower())
    return bool(pattern) and (
        fnmatch.fnmatchcase(node.name, pattern) or node.name.startswith((f"{pattern}.", f"{pattern}/"))
    )
