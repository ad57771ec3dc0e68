"""A call of a local function that leaves out an attribute means the function's default, which onnx's inliner forgets:
the attribute would then have the default of the operator inside, another number."""

from collections.abc import Iterable, Iterator

from onnx import ModelProto, NodeProto

from .graph import bodies


def write_defaults(model: ModelProto) -> None:
    """Write the defaults of local functions into the nodes that call them, in place; those in functions too."""
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    for node in _all([model.graph.node, *(function.node for function in model.functions)]):
        function = functions.get((node.domain, node.op_type, node.overload))
        given = {entry.name for entry in node.attribute}
        if function is not None:
            node.attribute.extend(entry for entry in function.attribute_proto if entry.name not in given)


def _all(parts: Iterable[Iterable[NodeProto]]) -> Iterator[NodeProto]:
    for nodes in parts:
        for node in nodes:
            yield node
            yield from _all(body.node for body in bodies(node).values())
