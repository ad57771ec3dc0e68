"""Ranges of every FP32 value of the original over calibration samples, as `exporters/ranges` has them for programs.

Integers are not magnitudes: only FP32 values are measured, one at a time, as the original runs.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce

import numpy as np
from onnx import GraphProto, NodeProto

from ...policy.classes import Trait, has
from ...policy.weights import NUMPY_HALVES
from ...ranges.ranges import Limits, NodeProfile, Profile, Range, RangeCollector
from ..reading.graph import BODIES, FLOAT, ForeignProgram, bodies, graphs, read_by
from .oracle import Oracle

LARGEST = {dtype: Limits.of(dtype).largest for dtype in NUMPY_HALVES}


def profile(
    program: ForeignProgram, batches: Iterable[Mapping[str, np.ndarray]], dtype: str
) -> dict[str, Range]:
    """Value → range over all batches; constants have theirs too."""
    collectors: dict[str, RangeCollector] = {}

    def observe(name: str, array: np.ndarray, type_: int) -> None:
        if type_ == FLOAT:
            collector = collectors.setdefault(name, RangeCollector(Limits.of(dtype)))
            collector.add(array)

    for name, array in program.weights.items():
        observe(name, np.asarray(array), program.types.get(name, 0))
    oracle = Oracle(program.model, program.weights, observe=observe)
    for inputs in batches:
        oracle.run(inputs)
    return {name: collector.range() for name, collector in collectors.items()}


def never_run(program: ForeignProgram, ranges: Mapping[str, Range]) -> list[str]:
    """The nodes that gave no number on any sample, but those that only move values; ``ranges``: of all values."""
    idle = []
    for node in _run(program.graph):
        given = [name for name in node.output if program.is_float(name)]
        ran = any(name in ranges and ranges[name].count for name in given)
        if given and not ran and not has(node.op_type, Trait.MOVES):
            idle.append(node.name)
    return idle


def _run(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes that the oracle runs: those of the graph, and of bodies that are planned too."""
    for node in graph.node:
        for body in bodies(node).values() if node.op_type in BODIES else ():
            yield from _run(body)
        yield node


def node_profile(program: ForeignProgram, ranges: Mapping[str, Range], dtype: str, batches: int) -> Profile:
    """The ranges by node, for `ranges.ranges.suspicion` and the report; inputs and constants by their own names."""
    makers = {name: node.name for node in program.nodes for name in node.output}
    given = {value.name: "placeholder" for graph in graphs(program.graph) for value in graph.input}
    given |= dict.fromkeys(program.weights, "get_attr")
    nodes = {
        name: NodeProfile(name, kind, (), ranges[name]) for name, kind in given.items() if name in ranges
    }
    for node in program.nodes:
        if held := [ranges[name] for name in node.output if name in ranges]:
            read = [name for name in node.input if name in ranges] or sorted(read_by(node) & set(ranges))
            reads = tuple(makers.get(name, name) for name in read)
            nodes[node.name] = NodeProfile(node.name, node.op_type, reads, reduce(Range.joined, held))
    return Profile(dtype, batches, nodes)
