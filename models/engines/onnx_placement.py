"""The place where ONNX Runtime computes each node of a file: the device, or the CPU for want of a kernel on the device.

The list of a session's providers does not show this. Nodes that compute sizes belong on the CPU; one that computes a
request's values there costs copies in both directions, and the host waits for it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

RECORD = "session.record_ep_graph_assignment_info"  # an option of the session, which must be "1"
_ON_CPU = "CPUExecutionProvider"
_SIZES = ("Shape", "Size")  # what follows them alone are sizes, which the host knows
_HALVES = (10, 16)  # TensorProto.FLOAT16, BFLOAT16
_NAMED = 8  # nodes, in a sentence


@dataclass(frozen=True, slots=True)
class Placement:
    """``nodes``: how many of them each provider computes. ``on_cpu``: those that compute values of a request on the CPU
    (``operator 'name'``); ``half_on_cpu``: those of them that take or give half tensors."""

    nodes: Mapping[str, int]
    on_cpu: tuple[str, ...] = ()
    half_on_cpu: tuple[str, ...] = ()

    def sentence(self) -> str:
        """A sentence on the nodes that the CPU computes; empty where all values are computed on the device."""
        if not self.on_cpu:
            return ""
        halves = f", of them {_listed(self.half_on_cpu)} with half tensors" if self.half_on_cpu else ""
        return f"ONNX Runtime computes {_listed(self.on_cpu)} on the CPU, for want of a kernel on the device{halves}"


def placement_of(session: onnxruntime.InferenceSession, path: Path) -> Placement:
    """The placement of a session's nodes, made with `RECORD`; ``path``: its file, read only where some are on the
    CPU."""
    placed = [
        (subgraph.ep_name, node)
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    ]
    nodes = Counter(provider for provider, _ in placed)
    on_cpu = [node for provider, node in placed if provider == _ON_CPU]
    if not on_cpu:
        return Placement(nodes)
    file = _File(path)
    values = [node for node in on_cpu if node.name not in file.sizes]
    halves = [node for node in values if node.name in file.halves]
    return Placement(nodes, _described(values), _described(halves))


def _described(nodes: list[Any]) -> tuple[str, ...]:
    return tuple(f"{node.op_type} '{node.name}'" for node in nodes)


def _listed(nodes: tuple[str, ...]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class _File:
    """``sizes``: the nodes that do not depend on the inputs' values; ``halves``: those with a half tensor. By name; one
    that ONNX Runtime made or renamed is in neither."""

    def __init__(self, path: Path) -> None:
        import onnx  # not needed where every node is on the device

        model = onnx.load(path, load_external_data=False)
        graph = onnx.shape_inference.infer_shapes(model).graph
        values = (*graph.input, *graph.output, *graph.value_info)
        typed = {value.name: value.type.tensor_type.elem_type for value in values}
        typed |= {initializer.name: initializer.data_type for initializer in graph.initializer}
        constant = {initializer.name for initializer in graph.initializer}
        depends = {value.name for value in graph.input} - constant
        self.sizes: set[str] = set()
        self.halves: set[str] = set()
        for node in graph.node:
            names = [name for name in (*node.input, *node.output) if name]
            if any(typed.get(name) in _HALVES for name in names):
                self.halves.add(node.name)
            bodies = [body for attribute in node.attribute for body in _bodies(attribute)]
            if node.op_type in _SIZES or (depends.isdisjoint(node.input) and not bodies):
                self.sizes.add(node.name)
            else:
                depends.update(node.output)
        self.sizes.discard("")  # one without a name cannot be told from others


def _bodies(attribute: Any) -> Iterator[Any]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs
