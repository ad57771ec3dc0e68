"""The rounding of the type in which each tensor is computed."""

from collections.abc import Collection, Mapping, Sequence

from ..graph.backend import GraphNode

FP32 = 2.0**-24
ROUNDOFF: Mapping[str, float] = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of numpy's types of half


def unit_of_each(
    nodes: Sequence[GraphNode], own: Mapping[str, float], known: Collection[str]
) -> dict[str, float]:
    """The coarsest type between the tensors called ``known`` and each tensor; ``own``: the roundoff of its own type."""
    found = dict(own)
    for node in nodes:
        before = (found.get(one, FP32) for one in node.inputs if one not in known)
        found[node.name] = max((own.get(node.name, FP32), *before))
    return found
