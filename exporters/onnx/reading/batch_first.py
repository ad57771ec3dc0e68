"""A graph that has the batch of an input or output on another axis than the first gets it as the first.

Each such input or output keeps its name, and a Transpose stands between it and the graph's own layout, as
`models/capture/child.py` moves the axes of a module.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, shape_inference

from ....models.errors import BadFolder
from ....models.spec.batch_axis import batch_back, batch_first
from ....models.spec.spec import ModelSpec, TensorSpec
from .graph import ForeignProgram, Names, names_in, rename_everywhere, replace_all, walk
from .large_files import weights_as_inputs

BATCH_AXIS = "__batch_axis"  # at the end of the name of such a Transpose


def with_batch_first(program: ForeignProgram, spec: ModelSpec, path: Path) -> ForeignProgram:
    """The program with these Transposes, written into its graph. Raises as `move_batch_first`."""
    types = dict(program.types)
    for name, inner in move_batch_first(program.graph, spec, path).items():
        types[inner] = types[name]
    return replace(program, types=types)


def move_batch_first(graph: GraphProto, spec: ModelSpec, path: Path) -> dict[str, str]:
    """Write these Transposes into a graph; gives the name of each moved input or output and the one it has inside.

    Raises BadFolder for a rank that does not fit. A name that the graph does not have is left to `signature.hold`.
    """
    moves = [tensor for tensor in (*spec.inputs, *spec.outputs) if tensor.batch_axis]
    values, nodes = Names(names_in(graph)), Names(node.name for node in walk(graph))
    given_back = {value.name for value in graph.input} & {value.name for value in graph.output}
    found = dict[str, str]()
    for tensor in moves:
        side, is_input = (graph.input, True) if tensor in spec.inputs else (graph.output, False)
        value = next((value for value in side if value.name == tensor.name), None)
        if value is None:
            continue
        if tensor.name in given_back:
            raise BadFolder(
                f"{path}: '{tensor.name}' is an input that the graph gives back as it is: batch_axis is not taken "
                "for it; leave the output out, or copy it with an Identity"
            )
        _move(value, tensor, path)
        found[tensor.name] = values.fresh(f"{tensor.name}__own_layout")
        node = nodes.fresh(f"{tensor.name}{BATCH_AXIS}")
        order = (batch_back if is_input else batch_first)(range(len(tensor.shape)), tensor.batch_axis)
        put_between(graph, tensor.name, found[tensor.name], node, order, is_input)
    return found


def _move(value: ValueInfoProto, tensor: TensorSpec, path: Path) -> None:
    """The declared sizes of an input or output, the batch in front."""
    shape = value.type.tensor_type.shape
    if len(shape.dim) != len(tensor.shape):
        sizes = ",".join(str(dim.dim_value) if dim.HasField("dim_value") else "?" for dim in shape.dim)
        raise BadFolder(
            f"{path}: '{tensor.name}': model.toml says {tensor.as_called().describe_shape()}, the graph has "
            f"[{sizes}] (? is free)"
        )
    replace_all(shape.dim, batch_first(list(shape.dim), tensor.batch_axis))


def put_between(
    graph: GraphProto, name: str, inner: str, node: str, order: Sequence[int], is_input: bool
) -> None:
    """A Transpose named ``node`` between an input or output and its value inside of the graph, which becomes ``inner``;
    names are unique over all bodies (`normalise`)."""
    rename_everywhere(graph, name, inner)
    read, given = (name, inner) if is_input else (inner, name)
    move = helper.make_node("Transpose", [read], [given], node, perm=order)
    graph.node.insert(0 if is_input else len(graph.node), move)


_AXES_ARE_AN_INPUT = 13  # since this opset


def keep_squeezed_batch(model: ModelProto) -> None:
    """Give axes to each Squeeze without any, where the first axis of what it reads is free and the others are known. A
    Squeeze that drops none of the others becomes an Identity.

    PyTorch's exporter writes ``x.squeeze()`` so: with one row it would drop the batch too.
    """
    squeezes = [node for node in walk(model.graph) if node.op_type == "Squeeze" and not _has_axes(node)]
    if not squeezes:
        return
    inferred = shape_inference.infer_shapes(weights_as_inputs(model))  # it takes at most 2 GiB
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.input)}
    opset = max((one.version for one in model.opset_import if not one.domain), default=0)
    for node in squeezes:
        axes = _axes_but_the_batch(known.get(node.input[0]))
        if axes == []:
            node.op_type = "Identity"
        elif axes and opset < _AXES_ARE_AN_INPUT:
            node.attribute.append(helper.make_attribute("axes", axes))
        elif axes:
            name = f"{node.output[0]}_squeezed_axes"
            model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(axes)], axes))
            node.input.append(name)


def _has_axes(node: NodeProto) -> bool:
    return len(node.input) > 1 or any(attribute.name == "axes" for attribute in node.attribute)


def _axes_but_the_batch(value: ValueInfoProto | None) -> list[int] | None:
    """The axes of size 1; None where the first is not free, or where another's size is not known."""
    dims = value.type.tensor_type.shape.dim if value is not None else ()
    if not dims or dims[0].HasField("dim_value") or not all(dim.HasField("dim_value") for dim in dims[1:]):
        return None
    return [axis for axis, dim in enumerate(dims) if axis and dim.dim_value == 1]
