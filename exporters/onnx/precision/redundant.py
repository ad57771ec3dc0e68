"""Casts that a half graph does not need: the second of two alike, the way back of one that lost nothing, the first of
two from an integer, and one from half to half."""

from collections.abc import Callable, Mapping

from onnx import GraphProto, NodeProto

from ..reading.graph import FLOAT, FLOATING, HALVES, attribute, graphs, walk
from ..reading.widening import rename_reads


def drop_casts(graph: GraphProto, half: int, types: Callable[[], Mapping[str, int]]) -> set[str]:
    """Drop them from the main graph, in place; gives their names. No answer changes. ``types`` is called where needed.

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
            _read_instead(graph, node.output[0], first[key])
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
            _read_instead(graph, result, source)
        elif source in made and source not in ends:  # its maker gives the output itself
            made[source].output[:] = [result if name == source else name for name in made[source].output]
            _read_instead(graph, source, result)
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


def _read_instead(graph: GraphProto, old: str, new: str) -> None:
    rename_reads(graph, old, new)
    for part in graphs(graph):
        for value in part.output if part is not graph else ():
            value.name = new if value.name == old else value.name


def _to(node: NodeProto) -> int:
    to = attribute(node, "to")
    assert isinstance(to, int)
    return to


def _remove(graph: GraphProto, names: set[str]) -> None:
    if names:
        copies = [NodeProto.FromString(n.SerializeToString()) for n in graph.node if n.name not in names]
        del graph.node[:]
        graph.node.extend(copies)
