"""A foreign graph held against model.toml, and model.toml's free dimensions made exact by the graph."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from ....models.errors import BadFolder
from ....models.spec.batch_axis import batch_back
from ....models.spec.datatypes import DATATYPES, name_of
from ....models.spec.filled_lengths import settled
from ....models.spec.spec import Dim, ModelSpec, TensorSpec
from .graph import replace_all


def hold(model: ModelProto, spec: ModelSpec, path: Path) -> tuple[ModelSpec, list[str]]:
    """Give the exact spec and what to tell; the graph gets the spec's order and symbolic free dimensions.

    Raises BadFolder naming the tensor, what model.toml says and what the graph has.
    """
    notes: list[str] = []
    for what, values, tensors in (
        ("input", model.graph.input, spec.inputs),
        ("output", model.graph.output, spec.outputs),
    ):
        _order(path, what, values, tensors)
        for value, tensor in zip(values, tensors, strict=True):
            if what == "output" and (stated := _misstated(value, tensor)):
                value.type.tensor_type.ClearField("shape")
                shape = tensor.as_called().describe_shape()
                notes.append(f"the file states output '{tensor.name}' as {stated}; {shape} counts")
            _check(path, f"{what} '{tensor.name}'", value, tensor)
    sizes = [size_of(value, 0) for value in model.graph.input] if spec.batched else []
    rows = {size for size in sizes if size is not None}
    if rows - {1}:
        raise BadFolder(
            f"{path}: the graph's inputs have {sorted(rows - {1})[0]} rows fixed as their first axis, but a "
            "model's batch is free: export it with a dynamic first axis, or set max_batch_size = 0"
        )
    if rows and spec.max_batch_size > 1:
        notes.append("the graph takes batches of 1 only, so max_batch_size is 1")
        spec = spec.with_max_batch_size(1)
    inputs = settled(
        [
            _exact(path, spec, tensor, value)
            for tensor, value in zip(spec.inputs, model.graph.input, strict=True)
        ]
    )
    spec = replace(spec, inputs=_named_alike(spec, inputs, model.graph.input))
    for values, tensors in ((model.graph.input, spec.inputs), (model.graph.output, spec.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            _write_shape(spec, value, tensor)
    return spec, notes


def _order(path: Path, what: str, values, tensors: Sequence[TensorSpec]) -> None:  # type: ignore[no-untyped-def]
    has, wanted = {value.name: value for value in values}, [tensor.name for tensor in tensors]
    if sorted(has) != sorted(wanted):
        missing = [name for name in wanted if name not in has]
        more = [name for name in has if name not in wanted]
        raise BadFolder(
            f"{path}: model.toml names the {what}s {wanted}, the graph has {list(has)}: "
            + "; ".join(
                [f"{what} '{name}' is not in the graph" for name in missing]
                + [f"{what} '{name}' is not in model.toml" for name in more]
            )
        )
    replace_all(values, [has[name] for name in wanted])


def _check(path: Path, what: str, value: ValueInfoProto, tensor: TensorSpec) -> None:
    type_ = value.type.tensor_type
    came = datatype_of(value)
    if came != tensor.datatype:
        raise BadFolder(f"{path}: {what}: model.toml says {tensor.datatype}, the graph has {came}")
    if not type_.HasField("shape"):
        return
    sizes = sizes_of(value)
    if len(sizes) != len(tensor.shape) or not all(
        size is None or dim.admits(size) for dim, size in zip(tensor.shape, sizes, strict=True)
    ):
        raise BadFolder(
            f"{path}: {what}: model.toml says {tensor.as_called().describe_shape()}, the graph has "
            f"{_described(batch_back(sizes, tensor.batch_axis))} (? is free)"
        )


def _described(sizes: Sequence[int | None]) -> str:
    return f"[{','.join('?' if size is None else str(size) for size in sizes)}]"


def _misstated(value: ValueInfoProto, tensor: TensorSpec) -> str:
    """The shape that a file states where model.toml says another number of axes; empty where it says as many.

    ONNX Runtime gives what it computes, whatever a file states of its outputs; an exporter states what the traced call
    had. Answers are checked when the file has been run (`onnx/forms.py`).
    """
    type_ = value.type.tensor_type
    if not type_.HasField("shape") or len(type_.shape.dim) == len(tensor.shape):
        return ""
    return _described(sizes_of(value))


def datatype_of(value: ValueInfoProto) -> str:
    """The protocol's name of a value's element type; ONNX's own for what is no datatype here (STRING, UNDEFINED)."""
    element = value.type.tensor_type.elem_type
    if element == TensorProto.UNDEFINED or element == TensorProto.STRING:
        return TensorProto.DataType.Name(element)
    name = name_of(helper.tensor_dtype_to_np_dtype(element))
    return name if name in DATATYPES else TensorProto.DataType.Name(element)


def size_of(value: ValueInfoProto, axis: int) -> int | None:
    """The size of an axis; None where it is free."""
    dims = value.type.tensor_type.shape.dim
    return dims[axis].dim_value if axis < len(dims) and dims[axis].HasField("dim_value") else None


def sizes_of(value: ValueInfoProto) -> list[int | None]:
    """The size of each axis; None where it is free."""
    return [size_of(value, axis) for axis in range(len(value.type.tensor_type.shape.dim))]


def _exact(path: Path, spec: ModelSpec, tensor: TensorSpec, value: ValueInfoProto) -> TensorSpec:
    shape = list(tensor.shape)
    for axis, dim in enumerate(shape):
        size = size_of(value, axis)
        if size is None or dim.fixed or (spec.batched and axis == 0):
            continue
        if dim.maximum is not None:
            raise BadFolder(
                f"{path}: input '{tensor.name}': model.toml says {dim.to_json()} for axis {axis}, the graph takes "
                f"{size} only; write that, or -1"
            )
        shape[axis] = Dim(size, size, dim.name)
    return replace(tensor, shape=tuple(shape))


def _named_alike(spec: ModelSpec, tensors: Sequence[TensorSpec], values) -> tuple[TensorSpec, ...]:  # type: ignore[no-untyped-def]
    """Free dimensions that share a symbol in the graph are equal, so they share a name."""
    places: dict[str, list[tuple[int, int]]] = {}
    for index, value in enumerate(values):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param and not (spec.batched and axis == 0):
                places.setdefault(dim.dim_param, []).append((index, axis))
    shapes = [list(tensor.shape) for tensor in tensors]
    for symbol, shared in places.items():
        known = next((shapes[i][a].name for i, a in shared if shapes[i][a].name), None)
        name = known or (symbol if len(shared) > 1 and Dim.is_name(symbol) else None)
        for i, a in shared:
            if name and not shapes[i][a].fixed and shapes[i][a].name is None:
                shapes[i][a] = replace(shapes[i][a], name=name)
    return tuple(replace(tensor, shape=tuple(shape)) for tensor, shape in zip(tensors, shapes, strict=True))


def _write_shape(spec: ModelSpec, value: ValueInfoProto, tensor: TensorSpec) -> None:
    """Sizes that the graph knows stay; what is free gets a symbol."""
    shape = value.type.tensor_type.shape
    shape.SetInParent()
    for axis, dim in enumerate(tensor.shape):
        found = shape.dim[axis] if axis < len(shape.dim) else shape.dim.add()
        if not found.HasField("dim_value") and not found.dim_param:
            batch = spec.batched and axis == 0
            found.dim_param = "batch" if batch else dim.name or f"{tensor.name}_{axis}"
