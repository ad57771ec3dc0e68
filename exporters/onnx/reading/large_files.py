"""ONNX models of 2 GiB and more, which protobuf cannot write in one piece: their weights stand in another file."""

from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from .bounded_file import bytes_of, tensors

SELF_CONTAINED_BELOW = 2**31 - 2**24  # bytes of weights: protobuf's limit, with room for the graph itself
DATA = ".data"  # suffix of the weights' own file
_SMALL = 1024  # bytes: such a tensor stays in the graph, where shape inference sees it
_ALIGNED = 4096  # of a weight's place in its file, so that ONNX Runtime can map it


def is_large(model: ModelProto) -> bool:
    """True if the ONNX model is too large for one file with its weights inside: protobuf writes at most 2 GiB."""
    return sum(bytes_of(tensor) for tensor in tensors(model)) >= SELF_CONTAINED_BELOW


def save(model: ModelProto, path: Path) -> None:
    """Write a model whose weights are in memory; those of a large one into ``<path>.data``. The model is not changed.

    Source: the external data of ``onnx.proto``.
    """
    if not is_large(model):
        onnx.save(model, path)
        return
    bare, data = without_weights(model), path.with_name(path.name + DATA)
    with data.open("wb") as file:
        for tensor in model.graph.initializer:
            if bytes_of(tensor) <= _SMALL or tensor.data_type == TensorProto.STRING:
                bare.graph.initializer.append(tensor)
                continue
            file.seek(-file.tell() % _ALIGNED, 1)
            offset = file.tell()
            length = file.write(tensor.raw_data or numpy_helper.to_array(tensor).tobytes())
            bare.graph.initializer.append(_pointer(tensor, data.name, offset, length))
    onnx.save(bare, path)


def remove_onnx(path: Path) -> None:
    """Delete the file, and that of its weights where they stand beside it."""
    for file in (path, path.with_name(path.name + DATA)):
        file.unlink(missing_ok=True)


def check(model: ModelProto, full: bool = False) -> None:
    """Check a model with ``onnx.checker``, and raise the checker's own errors. A large model is checked without its
    weights: the checker does not read them."""
    onnx.checker.check_model(weights_as_inputs(model) if is_large(model) else model, full_check=full)


def weights_as_inputs(model: ModelProto, above: int = _SMALL) -> ModelProto:
    """A copy of the model in which initialisers of more than ``above`` bytes are inputs, with their type and shape."""
    bare = without_weights(model)
    known = {value.name for value in bare.graph.input}
    for tensor in model.graph.initializer:
        if bytes_of(tensor) <= above:
            bare.graph.initializer.append(tensor)
        elif tensor.name not in known:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            bare.graph.input.append(value)
    return bare


def without_weights(model: ModelProto) -> ModelProto:
    """A copy of the model without the graph's initialisers."""
    bare, graph = ModelProto(), model.graph
    bare.ir_version = model.ir_version
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.metadata_props.extend(model.metadata_props)
    bare.graph.name = graph.name
    bare.graph.node.extend(graph.node)
    bare.graph.input.extend(graph.input)
    bare.graph.output.extend(graph.output)
    bare.graph.value_info.extend(graph.value_info)
    bare.graph.sparse_initializer.extend(graph.sparse_initializer)
    return bare


def _pointer(tensor: TensorProto, file: str, offset: int, length: int) -> TensorProto:
    pointer = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    pointer.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
        pointer.external_data.add(key=key, value=value)
    return pointer
