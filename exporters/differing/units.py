"""The rounding of the type in which each tensor is computed."""

from collections.abc import Collection, Mapping, Sequence

from ...models.spec.spec import UNIT_ROUNDOFF
from ..graph.backend import GraphNode

FP32 = 2.0**-24
# The keys are numpy's names for the types of half.
ROUNDOFF: Mapping[str, float] = {"float16": UNIT_ROUNDOFF["fp16"], "bfloat16": UNIT_ROUNDOFF["bf16"]}


def unit_of_each(
    nodes: Sequence[GraphNode], own: Mapping[str, float], known: Collection[str]
) -> dict[str, float]:
    """The coarsest type between the tensors called ``known`` and each tensor; ``own``: the roundoff of its own type."""
    found = dict(own)
    for node in nodes:
        before = (found.get(one, FP32) for one in node.inputs if one not in known)
        found[node.name] = max((own.get(node.name, FP32), *before))
    return found
