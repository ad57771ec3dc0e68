"""A Squeeze without axes drops the batch too where it has one row: it gets the axes that it drops of every other batch.

Such a node comes of ``x.squeeze()``, which PyTorch's exporter writes so where the batch is free.
"""

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, shape_inference

from .graph import walk

_AXES_ARE_AN_INPUT = 13  # since this opset


def keep_squeezed_batch(model: ModelProto) -> None:
    """Give axes to each Squeeze without any, where the first axis of what it reads is free and the others are known. A
    Squeeze that drops none of the others becomes an Identity."""
    squeezes = [node for node in walk(model.graph) if node.op_type == "Squeeze" and not _has_axes(node)]
    if not squeezes:
        return
    inferred = shape_inference.infer_shapes(model)
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
