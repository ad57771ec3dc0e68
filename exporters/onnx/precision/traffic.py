"""The bytes that the casts of a half ONNX graph move, and those that half saves, per run of the example's batch."""

from collections.abc import Iterator, Mapping

import torch
from onnx import NodeProto

from ...graph.traffic import Cast, Traffic
from ..reading.graph import FLOAT, HALVES, attribute, walk
from ..reading.typing import value_types
from .op_lists import ops
from .profile import Range
from .rewrite import HalfGraph

_TORCH = {FLOAT: torch.float32, HALVES["fp16"]: torch.float16, HALVES["bf16"]: torch.bfloat16}
_VIEWS = ops("Identity Reshape Flatten Squeeze Unsqueeze")


def traffic(half: HalfGraph, unplaced: HalfGraph, ranges: Mapping[str, Range]) -> Traffic:
    """``unplaced``: the same half before its casts were placed. ``ranges``: of the original, on the example."""
    casts = sorted(_casts(half, ranges), key=lambda cast: -cast.bytes)
    before = sum(cast.bytes for cast in _casts(unplaced, ranges))
    return Traffic(casts, before, _saved(half, ranges))


def _casts(graph: HalfGraph, ranges: Mapping[str, Range]) -> Iterator[Cast]:
    types = value_types(graph.model, graph.weights)
    nodes = list(walk(graph.model.graph))
    for node in nodes:
        if _is_cast(node) and types[node.input[0]] in set(_TORCH) - {attribute(node, "to")}:
            source, result = (_TORCH[types[name]] for name in (node.input[0], node.output[0]))
            readers = tuple(other.name for other in nodes if node.output[0] in other.input)
            elements = _elements(node.input[0], graph, ranges)
            moved = elements * (source.itemsize + result.itemsize)
            name = graph.sources.get(node.input[0], node.input[0])
            yield Cast(name, source, result, moved, readers)


def _saved(graph: HalfGraph, ranges: Mapping[str, Range]) -> int:
    types = value_types(graph.model, graph.weights)
    names = (
        name
        for node in walk(graph.model.graph)
        if not _is_cast(node) and node.op_type not in _VIEWS
        for name in (*node.input, *node.output)
    )
    return sum(2 * _elements(name, graph, ranges) for name in names if types.get(name) in HALVES.values())


def _elements(name: str, graph: HalfGraph, ranges: Mapping[str, Range]) -> int:
    if name in graph.weights:
        return graph.weights[name].size
    found = ranges.get(graph.sources.get(name, name))
    return found.numel if found else 1


def _is_cast(node: NodeProto) -> bool:
    return node.op_type == "Cast" and attribute(node, "to") in _TORCH
