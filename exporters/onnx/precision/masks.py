"""Mask sentinels (−1e9, −3.4e38) of a foreign graph, rewritten to numbers that half has; FP32 answers as before.

The same argument as for captured programs (`exporters/ranges/sentinels.py`): the mask becomes LOW, whose exponential is
0 as well; where scores are added to it, a floor of HIGH goes under the softmax, so that a row that is masked
altogether stays uniform. Connected sentinels are rewritten together or not at all. An output that is the sentinel
itself is LOW then, which the gate takes for a sentinel of that sign (`gate/parity.py`, rule 0).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto, NodeProto, helper

from ...gate.divergence import SENTINEL
from ...policy.classes import Trait, has
from ...ranges.masks import HIGH, LOW, MAX_SCORE, NEUTRAL, SLACK, Masked, Unknown, chosen, softmax_doubt
from ...ranges.ranges import Range
from ..reading.graph import FLOAT, ForeignProgram, Names, bodies, names_in, read_by, walk
from .oracle import Oracle

Arrays = Mapping[str, np.ndarray]


@dataclass(slots=True)
class _Group:
    """Connected sentinels. ``sites``: the reads of constants that have a sentinel (node, slot); ``nodes``: hold one."""

    sites: list[tuple[str, int]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    sinks: list[tuple[NodeProto, Masked]] = field(default_factory=list)
    most: float = 0.0
    fault: str = ""

    def join(self, other: "_Group") -> None:
        self.sites += other.sites
        self.nodes += other.nodes
        self.sinks += other.sinks
        self.most, self.fault = max(self.most, other.most), self.fault or other.fault


@dataclass(frozen=True, slots=True)
class Rewritten:
    """``done``: the rewrites, as sentences. ``keep``: node → why it needs FP32, where its sentinel stays."""

    program: ForeignProgram
    done: tuple[str, ...] = ()
    keep: Mapping[str, str] = field(default_factory=dict)


def rewrite_masks(program: ForeignProgram, ranges: Mapping[str, Range], asked: Iterable[Arrays]) -> Rewritten:
    """The program with its sentinels rewritten where that is proven.

    ``asked``: inputs on which both must answer alike, bit for bit but for sentinels.
    """
    doubts = [(group, _doubt(group)) for group in _Flow(program, ranges).groups()]
    groups = [group for group, doubt in doubts if not doubt]
    keep = {
        name: f"a mask value half does not have: {doubt}"
        for group, doubt in doubts
        for name in (group.nodes if doubt else ())
    }
    if not groups:
        return Rewritten(program, keep=keep)
    rewritten = _rewritten(program, groups)
    one, other = (Oracle(each.model, each.weights) for each in (program, rewritten))
    for inputs in asked:
        if not _same(one.run(inputs), other.run(inputs)):
            differs = "without it FP32 answers otherwise"
            return Rewritten(program, keep={**keep, **{n: differs for group in groups for n in group.nodes}})
    return Rewritten(rewritten, tuple(_described(group) for group in groups), keep)


def _same(before: Arrays, after: Arrays) -> bool:
    return all(_same_but_for_sentinels(before[name], after[name]) for name in before)


def _same_but_for_sentinels(before: np.ndarray, after: np.ndarray) -> bool:
    if before.dtype.kind != "f":
        return bool(np.array_equal(before, after))
    sentinel = np.isfinite(before) & (np.abs(before) >= SENTINEL)
    return bool(
        np.array_equal(np.where(sentinel, LOW, before), np.where(sentinel, LOW, after), equal_nan=True)
    )


def _doubt(group: _Group) -> str:
    """The reason why a group is not rewritten; empty where it is."""
    bound = SLACK * group.most
    if group.fault or not group.sites:
        return group.fault or "it has no constant"
    if bound > MAX_SCORE:
        return f"scores may reach {bound:.3g}, expected at most {MAX_SCORE:g}"
    for node, mask in group.sinks:
        if doubt := softmax_doubt(mask, SLACK * mask.bound, not mask.exact, f"'{node.name}'"):
            return doubt
    return ""


def _described(group: _Group) -> str:
    names = ", ".join(f"'{name}'" for name, _ in group.sites)
    floors = [f"'{node.name}'" for node, mask in group.sinks if not mask.exact]
    floor = f", with a floor of {HIGH:g} under {', '.join(floors)}" if floors else ""
    return f"the mask value that {names} reads became {LOW:g}{floor}: in FP32 the answers are the same"


class _Flow:
    """An abstract run over the main graph; values that go into a body are not followed."""

    def __init__(self, program: ForeignProgram, ranges: Mapping[str, Range]) -> None:
        self.program = program
        self.masked: dict[str, Masked] = {}
        self.group: dict[str, _Group] = {}  # value → the group it hangs in
        self.rules = Rules(program, ranges, self.masked)

    def groups(self) -> list[_Group]:
        constants = {name: mask for name, array in self.program.weights.items() if (mask := _held(array))}
        for value in self.program.graph.input:
            held = self.rules.ranges.get(value.name)
            if held is not None and held.sentinel_lowest < 0:
                self.masked[value.name] = Masked(held.sentinel_highest, bound=held.largest)
                self.group[value.name] = _Group(fault=f"the input '{value.name}' itself holds it")
        for node in self.program.graph.node:
            self.visit(node, {name: constants[name] for name in sorted(read_by(node)) if name in constants})
        for value in self.program.graph.output:
            if value.name in self.masked and not self.masked[value.name].exact:
                self.group[value.name].fault = f"the output '{value.name}' holds sums of a mask"
        return list({id(group): group for group in self.group.values()}.values())

    def visit(self, node: NodeProto, constants: Mapping[str, Masked]) -> None:
        followed = [name for name in sorted(read_by(node)) if name in self.masked]
        if not constants and not followed:
            return
        group = _Group(sites=[(node.name, slot) for slot, name in enumerate(node.input) if name in constants])
        self.masked |= constants
        try:
            found = self.rules.look(node)
        except Unknown as unknown:
            found, group.fault = None, str(unknown)
        for other in {id(self.group[name]): self.group[name] for name in followed}.values():
            group.join(other)
        mine = [self.masked[name] for name in (*followed, *constants)]
        group.most = max([group.most, *(mask.bound for mask in mine), found.bound if found else 0.0])
        if has(node.op_type, Trait.SOFTMAX):
            group.sinks.append((node, mine[0]))
        if found or group.fault or has(node.op_type, Trait.SOFTMAX):
            group.nodes.append(node.name)
        for name in constants:
            del self.masked[name]
        known = {id(self.group[name]) for name in followed}
        self.group = {name: group if id(each) in known else each for name, each in self.group.items()}
        self.group[node.output[0]] = group
        for name in node.output if found else ():
            self.masked[name], self.group[name] = found, group  # type: ignore[assignment]


def _held(array: np.ndarray) -> Masked | None:
    """The state of a constant with a sentinel; None for any other."""
    if array.dtype != np.float32 or not array.size:
        return None
    sentinel = np.isfinite(array) & (array <= -SENTINEL)
    values, rest = np.unique(array[sentinel]), np.abs(array[~sentinel])
    if len(values) != 1 or not (rest < SENTINEL).all():
        return None
    return Masked(float(values[0]), pure=not rest.size, bound=float(rest.max(initial=0.0)))


def _rewritten(program: ForeignProgram, groups: Iterable[_Group]) -> ForeignProgram:
    model, weights, types = ModelProto(), dict(program.weights), dict(program.types)
    model.CopyFrom(program.model)
    nodes = {node.name: node for node in model.graph.node}
    names, taken = Names({*names_in(model.graph), *weights}), Names(node.name for node in program.nodes)
    for group in groups:
        for name, slot in group.sites:
            old = nodes[name].input[slot]
            new = names.fresh(f"{old}__low")
            weights[new] = np.where(weights[old] <= -SENTINEL, np.float32(LOW), weights[old]).astype(
                np.float32
            )
            types[new], nodes[name].input[slot] = FLOAT, new
        for sink in (nodes[node.name] for node, mask in group.sinks if not mask.exact):
            floor, lifted = names.fresh("mask_floor"), names.fresh(f"{sink.input[0]}__lifted")
            weights[floor], types[floor], types[lifted] = np.asarray(HIGH, np.float32), FLOAT, FLOAT
            lift = helper.make_node(
                "Max", [sink.input[0], floor], [lifted], name=taken.fresh(f"{lifted}.floor")
            )
            sink.input[0] = lifted
            model.graph.node.insert(list(model.graph.node).index(sink), lift)
    read = {name for node in walk(model.graph) for name in node.input}
    weights = {name: array for name, array in weights.items() if name in read}
    return replace(program, model=model, weights=weights, types=types)


@dataclass(frozen=True, slots=True)
class Rules:
    """The effect of each ONNX op on a mask sentinel. ``masked``: the state of the values before. `look` gives the state
    of a node's results, None: no sentinel."""

    program: ForeignProgram
    ranges: Mapping[str, Range]
    masked: Mapping[str, Masked]

    def look(self, node: NodeProto) -> Masked | None:
        """Raises Unknown where no rule covers what the node does with a sentinel."""
        held = [name for name in node.input if name in self.masked]
        op = node.op_type
        if bodies(node) and not self.masked.keys().isdisjoint(read_by(node)):
            raise Unknown(f"it reaches the body of '{node.name}' ({op})")
        if not held or has(op, Trait.SEES_SIZES, Trait.SOFTMAX):
            return None
        if op == "Where" and node.input[0] not in self.masked:
            return self.choice(node, list(node.input[1:]))
        if op == "Concat":
            return self.choice(node, list(node.input))
        if op == "Mul" and len(held) == 1:
            return self.product(node, self.masked[held[0]])
        if op == "Add" and len(held) == 1:
            return self.sum(node, held[0])
        if has(op, Trait.COMPARES, Trait.SEES_PRECISION):
            return self.comparison(node)
        if op == "Clip" and held == [node.input[0]]:
            return self.clipped(node)
        if (has(op, Trait.COPIES) or op in ("Trilu", "ReduceMax")) and held == [node.input[0]]:
            mask = self.masked[held[0]]
            return replace(mask, pure=False) if op == "Trilu" else mask
        raise Unknown(f"it reaches '{node.name}' ({op})")

    def choice(self, node: NodeProto, names: list[str]) -> Masked:
        parts = [self.masked[name] if name in self.masked else self.ordinary(name) for name in names]
        return chosen(parts, f"'{node.name}'")

    def product(self, node: NodeProto, mask: Masked) -> Masked:
        """A product with zeros and ones only, as on all samples."""
        held = self.ranges.get(node.output[0], Range())
        if not (mask.pure and held.holds_only(mask.value)):
            raise Unknown(f"'{node.name}' multiplies a mask with more than zeros and ones")
        return Masked(mask.value)

    def sum(self, node: NodeProto, name: str) -> Masked:
        other = next(each for each in node.input if each != name)
        mask, more = self.masked[name], self.ordinary(other)
        return replace(mask, exact=mask.exact and more == 0, pure=False, bound=mask.bound + more)

    def comparison(self, node: NodeProto) -> None:
        """A comparison with a small number, or an infinity: the sentinel and its replacement are on the same side."""
        for name in node.input:
            number = self.program.weights.get(name)
            if name in self.masked and number is None:
                continue
            if number is None or not (np.isinf(number) | (np.abs(number) <= NEUTRAL)).all():
                raise Unknown(f"'{node.name}' compares a mask with '{name}'")

    def clipped(self, node: NodeProto) -> None:
        """A floor above every mask value: no sentinel is left."""
        low = self.program.weights.get(node.input[1]) if len(node.input) > 1 else None
        if low is None or not (low > HIGH).all():
            raise Unknown(f"'{node.name}' clips a mask")

    def ordinary(self, name: str) -> float:
        """The largest magnitude of a value without sentinels."""
        held = self.ranges.get(name)
        if held is None or held.infinite or held.sentinels:
            raise Unknown(f"'{name}' itself holds infinities or numbers of 1e9 and more")
        return held.largest
