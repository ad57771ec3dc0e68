"""Write the half graph for given dtypes, with each value cast once and unique names.

Casts that it does not need are dropped: the second of two alike, the way back of one that lost nothing, the first of
two from an integer, and one from half to half.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from ...policy.weights import Entry, in_range, measure, rounded
from ..reading.graph import (
    FLOAT,
    FLOATING,
    HALVES,
    ForeignProgram,
    Names,
    attribute,
    bodies,
    graphs,
    names_in,
    rename_everywhere,
    rename_reads,
    replace_all,
    walk,
)
from ..reading.typing import value_types
from .dtypes import Dtypes


class HalfConstants:
    """Every constant of a program in half, made once."""

    def __init__(self, weights: Mapping[str, np.ndarray], dtype: str) -> None:
        self._weights, self._dtype = weights, dtype
        self.in_range: set[str] = set()
        self._halves: dict[str, np.ndarray] = {}
        self._entries: dict[str, Entry] = {}

    def half(self, name: str) -> np.ndarray:
        if name not in self._halves:
            original = np.asarray(self._weights[name], np.float32, order="C")
            half = rounded(original, self._dtype)
            self._halves[name] = in_range(original, half) if name in self.in_range else half
        return self._halves[name]

    @property
    def asked(self) -> list[str]:
        """The constants that were weighed."""
        return list(self._entries)

    def bring_into_range(self, name: str) -> None:
        """From now on elements of this constant that vanish in half become half's least number of their sign, and
        elements that overflow its largest."""
        self.in_range.add(name)
        self._halves.pop(name, None)

    def entry(self, name: str) -> Entry:
        """The error of rounding the constant to half, as it is in the file."""
        if name not in self._entries:
            self._entries[name] = measure(name, np.asarray(self._weights[name], np.float32), self._dtype)
        return self._entries[name]


@dataclass(frozen=True, slots=True)
class HalfGraph:
    """``model`` without constants, ``weights`` by name (only those that are read); ``casts`` were inserted.

    ``sources``: the value of the original that a value of the half stands for, where its name is another.
    """

    model: ModelProto
    weights: Mapping[str, np.ndarray]
    casts: tuple[str, ...]
    sources: Mapping[str, str]


def rewrite(program: ForeignProgram, dtypes: Dtypes, ledger: HalfConstants, dtype: str) -> HalfGraph:
    """The half of a program. Inputs and outputs of the graph keep their datatypes."""
    model = ModelProto()
    model.CopyFrom(program.model)
    writer = _Writer(
        program,
        dtypes,
        HALVES[dtype],
        Names(names_in(model.graph) | set(program.weights)),
        Names(node.name for node in program.nodes),
    )
    writer.main(model.graph)
    half = {alias: ledger.half(name) for name, alias in writer.half_weights.items()}
    gone = drop_casts(model.graph, HALVES[dtype], lambda: value_types(model, {**program.weights, **half}))
    read = {name for graph in graphs(model.graph) for node in graph.node for name in node.input}
    original = {name: array for name, array in program.weights.items() if name in read}
    casts = tuple(name for name in writer.casts if name not in gone)
    return HalfGraph(model, {**original, **half}, casts, writer.sources)


@dataclass(slots=True)
class _Writer:
    program: ForeignProgram
    dtypes: Dtypes
    half: int
    names: Names
    nodes: Names
    aliases: dict[str, str] = field(default_factory=dict)  # value → its other dtype's name
    half_weights: dict[str, str] = field(default_factory=dict)
    casts: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def main(self, graph: GraphProto) -> None:
        self.redirect(graph)
        self.hand_out(graph)
        self.define_casts(graph)

    # First every read is pointed at the value in its dtype; then each graph gets the casts of its own values.

    def redirect(self, graph: GraphProto) -> None:
        for node in graph.node:
            for slot, half in self.dtypes.reads.get(node.name, {}).items():
                node.input[slot] = self.in_dtype(node.input[slot], half)
            if node.name in self.dtypes.half and node.op_type == "Cast":
                next(entry for entry in node.attribute if entry.name == "to").i = self.half
            for which, body in bodies(node).items():
                self.redirect(body)
                self.give(body, self.dtypes.gives[node.name, which])

    def give(self, body: GraphProto, wanted: list[bool | None]) -> None:
        for value, half in zip(body.output, wanted, strict=True):
            if half is not None:
                value.name = self.in_dtype(value.name, half)
                value.type.tensor_type.elem_type = self.half if half else FLOAT

    def in_dtype(self, name: str, half: bool) -> str:
        """The name under which a value can be read in that dtype."""
        if self.dtypes.is_half(name) == half or name not in self.dtypes.kinds:
            return name
        if name in self.program.weights:
            if name not in self.half_weights:
                self.half_weights[name] = self.names.fresh(f"{name}__half")
            return self.half_weights[name]
        if name not in self.aliases:
            self.aliases[name] = self.names.fresh(f"{name}__{'half' if half else 'fp32'}")
            self.sources[self.aliases[name]] = name
        return self.aliases[name]

    def hand_out(self, graph: GraphProto) -> None:
        """A half value that is an output of the model is cast back under the output's name."""
        inner: dict[str, str] = {}
        for value in graph.output:
            if self.dtypes.is_half(value.name):
                inner[value.name] = self.names.fresh(f"{value.name}__half")
                self.aliases[inner[value.name]] = self.aliases.pop(value.name, value.name)
        for name, renamed in inner.items():
            rename_everywhere(graph, name, renamed)
            self.dtypes.kinds[renamed] = self.dtypes.kinds[name]
            self.sources[renamed] = name
            if self.aliases[renamed] != name:  # a node reads it in FP32 already: that value is the output
                rename_reads(graph, self.aliases[renamed], name)
                self.aliases[renamed] = name

    def define_casts(self, graph: GraphProto) -> None:
        nodes: list[NodeProto] = []
        for value in graph.input:
            if self.dtypes.is_half(value.name):
                value.type.tensor_type.elem_type = self.half
            nodes += self.cast_of(value.name)
        for node in graph.node:
            for body in bodies(node).values():
                self.define_casts(body)
            results = list(node.output)
            back = self.cast_back(node) if node.name in self.dtypes.back else []
            nodes += [node, *back, *(cast for name in results for cast in self.cast_of(name))]
        replace_all(graph.node, nodes)

    def cast_of(self, name: str) -> list[NodeProto]:
        alias = self.aliases.get(name)
        if alias is None:
            return []
        return [self.cast(name, alias, FLOAT if self.dtypes.is_half(name) else self.half)]

    def cast_back(self, node: NodeProto) -> list[NodeProto]:
        """FP32 inside, half outside: the results of a node are cast to half under their own names."""
        casts = []
        for slot, name in enumerate(node.output):
            if name and self.dtypes.is_half(name):
                node.output[slot] = self.names.fresh(f"{name}__fp32")
                casts.append(self.cast(node.output[slot], name, self.half))
        return casts

    def cast(self, source: str, target: str, to: int) -> NodeProto:
        self.casts.append(self.nodes.fresh(f"{target}.cast"))
        return helper.make_node("Cast", [source], [target], name=self.casts[-1], to=to)


def drop_casts(graph: GraphProto, half: int, types: Callable[[], Mapping[str, int]]) -> set[str]:
    """Drop the needless casts from the main graph, in place; gives their names. No answer changes. ``types`` is called
    where needed.

    A value that the file casts as well is cast once; the reader of a value that goes from half to FP32 and back reads
    the first half value.
    """
    _straight(graph, half, types)
    gone = _back_again(graph, half, types) | _alike(graph)
    while dead := _unread(graph) - gone:
        gone |= dead
        _remove(graph, dead)
    return gone


def _straight(graph: GraphProto, half: int, types: Callable[[], Mapping[str, int]]) -> None:
    """Cast an integer to half directly: FP32 holds exactly every integer that is finite in FP16."""
    up = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast" and _to(node) == FLOAT
    }
    down = [n for n in graph.node if n.op_type == "Cast" and _to(n) == half and n.input[0] in up]
    known = types() if down and half == HALVES["fp16"] else {}
    for node in down:
        if known.get(up[node.input[0]], FLOAT) not in FLOATING:
            node.input[0] = up[node.input[0]]


def _alike(graph: GraphProto) -> set[str]:
    first: dict[tuple[str, int], str] = {}
    gone: set[str] = set()
    outputs = {value.name for value in graph.output}
    for node in [node for node in graph.node if node.op_type == "Cast"]:
        key = node.input[0], _to(node)
        if key not in first:
            first[key] = node.output[0]
        elif node.output[0] not in outputs:
            rename_reads(graph, node.output[0], first[key])
            gone.add(node.name)
    _remove(graph, gone)
    return gone


def _back_again(graph: GraphProto, half: int, types: Callable[[], Mapping[str, int]]) -> set[str]:
    """Drop the Casts to half of what is half already, or was so before it was cast to FP32."""
    up = {node.output[0]: node for node in graph.node if node.op_type == "Cast" and _to(node) == FLOAT}
    ends = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    down = [n for n in graph.node if n.op_type == "Cast" and _to(n) == half]
    if half not in ends.values():
        down = [node for node in down if node.input[0] in up]
    known = types() if down else {}
    made = {name: node for node in graph.node for name in node.output}
    gone: set[str] = set()
    for node in down:
        (before,), (result,) = node.input, node.output
        source = up[before].input[0] if before in up else before
        if known.get(source) != half:
            continue
        if result not in ends:
            rename_reads(graph, result, source)
        elif source in made and source not in ends:  # its maker gives the output itself
            made[source].output[:] = [result if name == source else name for name in made[source].output]
            rename_reads(graph, source, result)
        else:
            node.input[0] = source
            continue
        gone.add(node.name)
    _remove(graph, gone)
    return gone


def _unread(graph: GraphProto) -> set[str]:
    read = {name for node in walk(graph) for name in node.input}
    read |= {value.name for part in graphs(graph) for value in part.output}
    return {node.name for node in graph.node if node.op_type == "Cast" and node.output[0] not in read}


def _to(node: NodeProto) -> int:
    to = attribute(node, "to")
    assert isinstance(to, int)
    return to


def _remove(graph: GraphProto, names: set[str]) -> None:
    if names:
        replace_all(graph.node, [node for node in graph.node if node.name not in names])
