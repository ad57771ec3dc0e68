"""A call of a local function that leaves out an attribute means the function's default, which onnx's inliner forgets:
the attribute would then have the default of the operator inside, another number."""

from itertools import chain

from onnx import ModelProto

from .graph import walk


def write_defaults(model: ModelProto) -> None:
    """Write the defaults of local functions into the nodes that call them, in place; those in functions too."""
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    for node in chain.from_iterable(walk(part) for part in (model.graph, *model.functions)):
        function = functions.get((node.domain, node.op_type, node.overload))
        given = {entry.name for entry in node.attribute}
        if function is not None:
            node.attribute.extend(entry for entry in function.attribute_proto if entry.name not in given)
