"""Finds nodes that choose among candidates by their numbers (NonMaxSuppression, TopK). If two numbers are nearly equal,
a small error changes what is chosen."""

from onnx import GraphProto

# op → the inputs that it compares
_COMPARED = {"NonMaxSuppression": (0, 1), "TopK": (0,)}


def choosing(graph: GraphProto) -> str:
    """A sentence about the first such node of the main graph, and how to convert the model without it. Empty if the
    graph has no such node."""
    for node in graph.node:
        if node.op_type in _COMPARED:
            names = " and ".join(f"'{node.input[place]}'" for place in _COMPARED[node.op_type])
            return (
                f"what {node.op_type} '{node.name or node.output[0]}' chooses changes where {names} nearly tie: for a "
                "half of what computes them, name them as outputs under [[outputs]] in place of what is chosen, and "
                'choose outside of the model; boxes with their scores and classes may be outputs of kind = "detections"'
            )
    return ""
