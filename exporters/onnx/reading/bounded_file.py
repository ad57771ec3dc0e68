"""Reading an ONNX file that somebody else made: bounded, and never outside its folder.

Nothing in an ONNX file is executed by reading it. What could do harm are its sizes and the paths of its
external data, which name files to be read: they must be plain files inside the model folder.
"""

import os
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    external_data_helper,
    helper,
)

from ....models.errors import BadFolder, TooLarge
from ....models.files.guarded_reading import guarded
from ....models.files.opened_file import opened_named
from ....models.order.one_order import count_memory
from .graph import bodies, replace_all, walk

MAX_GRAPH_BYTES = 2**31 - 2**20  # of the file itself: protobuf's limit
MAX_BYTES = 2**34  # with its external data: a conversion has a model in memory six times
# Trees are lists of small numbers: bytes in memory for each of the file, read and then loaded by ONNX Runtime, as seen.
_TREES_READ, _TREES_LOADED = 6, 12
MAX_NODES = 200_000
MAX_DEPTH = 16  # of bodies in bodies
MAX_RANK = 64  # numpy's
GIT_LFS = b"version https://git-lfs.github.com/"
PACKED_BITS = dict.fromkeys(("INT4", "UINT4", "FLOAT4E2M1"), 4) | {"INT2": 2, "UINT2": 2}


@guarded("an ONNX file")
def read_model(path: Path, folder: Path, max_bytes: int = MAX_BYTES) -> ModelProto:
    """The model with its external data in it.

    Raises TooLarge beyond ``max_bytes``, BadFolder for a file that is not ONNX or whose data lies elsewhere.
    """
    model = read_graph(path, max_bytes)
    outside = [tensor for tensor in tensors(model) if external_data_helper.uses_external_data(tensor)]
    _load_external(path, folder.resolve(), outside, max_bytes)
    return model


@guarded("an ONNX file")
def read_graph(path: Path, max_bytes: int = MAX_GRAPH_BYTES) -> ModelProto:
    """The model without its external data. Raises TooLarge and BadFolder as `read_model` does."""
    try:
        with opened_named(path) as opened:
            _bound(path.name, os.fstat(opened.handle.fileno()).st_size, min(max_bytes, MAX_GRAPH_BYTES))
            file = opened.read()
            if b"TreeEnsemble" in file:
                count_memory(_TREES_READ * len(file), f"reading the trees of {path.name}")
            model = ModelProto.FromString(file)
    except OSError as error:
        raise BadFolder(f"{path} cannot be read: {error.strerror}; expected an ONNX file") from error
    except DecodeError as error:
        raise BadFolder(f"{path} is not an ONNX file: {_seen_instead(path)}") from error
    if not model.graph.node:
        raise BadFolder(f"{path} is not an ONNX model: its graph has no nodes")
    _bound_nodes(path, model)
    _require_text(path, model)
    _bound_ranks(path, model)
    nodes = (node for graph in (model.graph, *model.functions) for node in walk(graph))
    trees = sum(node.ByteSize() for node in nodes if node.op_type.startswith("TreeEnsemble"))
    count_memory(_TREES_LOADED * trees, f"loading the trees of {path.name}")
    _free_negative_sizes(model)
    _give_tables_as_tensors(model.graph)
    _drop_repeated_outputs(model.graph)
    _complete_outputs(model)
    return model


def _seen_instead(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(len(GIT_LFS))
    if first == GIT_LFS:
        return "it is the pointer that git keeps in its place: fetch the file itself with `git lfs pull`"
    return f"its {path.stat().st_size} bytes begin with {first[:16]!r} and cannot be read: is the file whole?"


def _free_negative_sizes(model: ModelProto) -> None:
    """Old exporters of Paddle write -1 for a free axis, where ONNX has no size at all."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("value")


def _give_tables_as_tensors(graph: GraphProto) -> None:
    """Make an output that maps classes to probabilities for each row (ZipMap) an output of the probabilities alone."""
    outputs = {value.name: value for value in graph.output}
    for node in graph.node:
        if node.op_type == "ZipMap" and node.domain == "ai.onnx.ml" and node.output[0] in outputs:
            classes = max(len(entry.ints) or len(entry.strings) for entry in node.attribute)
            value = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, [None, classes])
            outputs[node.output[0]].CopyFrom(value)
            node.CopyFrom(helper.make_node("Identity", node.input, node.output, name=node.name))


def _drop_repeated_outputs(graph: GraphProto) -> None:
    """An output that stands there twice is one output."""
    once = {value.name: value for value in reversed(graph.output)}
    if len(once) < len(graph.output):
        replace_all(graph.output, reversed(once.values()))


def _complete_outputs(model: ModelProto) -> None:
    """An output that was added by its name alone gets its type and shape from the graph, as ONNX Runtime finds them."""
    bare = [value for value in model.graph.output if not _is_complete(value)]
    if not bare:
        return
    whole = ModelProto()
    whole.CopyFrom(model)
    del whole.graph.output[:]
    whole.graph.output.extend(value for value in model.graph.output if _is_complete(value))
    try:
        inferred = onnx.shape_inference.infer_shapes(whole).graph
    except (onnx.shape_inference.InferenceError, ValueError):  # ValueError: above protobuf's 2 GiB
        return
    known = {value.name: value for value in (*inferred.value_info, *inferred.input)}
    for value in bare:
        if value.name in known:
            value.type.CopyFrom(known[value.name].type)


def _is_complete(value: ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind not in (None, "tensor_type") or value.type.tensor_type.HasField("shape")


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initialisers and attributes of the graph, its bodies and its functions."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for entry in node.attribute:
            if entry.HasField("t"):
                yield entry.t
            yield from entry.tensors
            for graph in (*((entry.g,) if entry.HasField("g") else ()), *entry.graphs):
                yield from _of_graph(graph)


def _bound(what: str, size: int, most: int) -> None:
    if size > most:
        raise TooLarge(f"{what} is {size} bytes; an ONNX model of up to {most} bytes is taken")


def _bound_nodes(path: Path, model: ModelProto) -> None:
    count = 0
    waiting = [(node, 1) for node in (*model.graph.node, *(n for f in model.functions for n in f.node))]
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise TooLarge(
                f"{path.name}: expected at most {MAX_NODES} nodes, nested at most {MAX_DEPTH} deep"
            )
        waiting += [(inner, depth + 1) for body in bodies(node).values() for inner in body.node]


def _require_text(path: Path, model: ModelProto) -> None:
    """Raises BadFolder for a name that is not UTF-8: protobuf gives its bytes in place of a string."""
    if wrong := next((name for name in _names(model) if not isinstance(name, str)), None):
        raise BadFolder(
            f"{path}: a name in the graph is {wrong[:80]!r}: expected text in UTF-8; is the file whole?"
        )


def _names(model: ModelProto) -> Iterator[str | bytes]:
    graphs = [model.graph, *(graph for node in walk(model.graph) for graph in bodies(node).values())]
    for graph in graphs:
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    yield from (tensor.name for tensor in tensors(model))
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
    for owner in (model.graph, *model.functions):
        for node in walk(owner):
            yield from (node.op_type, node.name, node.domain, *node.input, *node.output)
            yield from (entry.name for entry in node.attribute)


def _bound_ranks(path: Path, model: ModelProto) -> None:
    ranks = {tensor.name: len(tensor.dims) for tensor in tensors(model)}
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    ranks |= {value.name: len(value.type.tensor_type.shape.dim) for value in values}
    if beyond := [(name, rank) for name, rank in ranks.items() if rank > MAX_RANK]:
        name, rank = beyond[0]
        raise BadFolder(f"{path}: tensor '{name}' has {rank} dimensions: expected at most {MAX_RANK}")


def _load_external(path: Path, folder: Path, outside: list[TensorProto], max_bytes: int) -> None:
    total = path.stat().st_size
    for tensor in outside:
        file, offset, length = extent(path, folder, tensor)
        total += length
        _bound(f"{path.name} with its external data", total, max_bytes)
        with file.open("rb") as data:
            data.seek(offset)
            tensor.raw_data = data.read(length)
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def extent(path: Path, folder: Path, tensor: TensorProto) -> tuple[Path, int, int]:
    """The file in ``folder`` that holds the data of a tensor, the first byte there, and the number of bytes.

    Raises BadFolder where the file is no plain file in that folder, or too short."""
    info = _place_of_data(path, tensor)
    file = _inside(path, folder, tensor.name, info.location)
    size, offset = file.stat().st_size, info.offset or 0
    length = bytes_of(tensor, size - offset) if info.length is None else info.length
    if offset < 0 or length < 0 or offset + length > size:
        raise BadFolder(
            f"{path}: tensor '{tensor.name}' lies at bytes {offset} to {offset + length} of {info.location}, "
            f"which has {size}: is the file whole?"
        )
    return file, offset, length


def bytes_of(tensor: TensorProto, rest: int = 0) -> int:
    """The size of a tensor's data, of which the model may say nothing although other tensors follow in the same file.
    ``rest``, the bytes that are left of that file, for a type that is not known."""
    if tensor.data_type not in helper.get_all_tensor_dtypes():
        return rest
    name = TensorProto.DataType.Name(tensor.data_type)
    bits = PACKED_BITS.get(name) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return (prod(tensor.dims) * bits + 7) // 8


def _place_of_data(path: Path, tensor: TensorProto) -> external_data_helper.ExternalDataInfo:
    try:
        return external_data_helper.ExternalDataInfo(tensor)
    except ValueError as error:
        raise BadFolder(f"{path}: the place of the data of tensor '{tensor.name}': {error}") from error


def external_files(path: Path, model: ModelProto) -> dict[str, Path]:
    """The files that hold the data of a model's tensors, by the location that the model names.

    Raises BadFolder for one that is no plain file in the folder of ``path``, or too short for its tensors.
    """
    folder = path.parent.resolve()
    outside = (tensor for tensor in tensors(model) if external_data_helper.uses_external_data(tensor))
    return {_place_of_data(path, tensor).location: extent(path, folder, tensor)[0] for tensor in outside}


def _inside(path: Path, folder: Path, tensor: str, location: str) -> Path:
    """The plain file that ``location`` names below the model file. Links may lead to the folder, and to that of the
    model file itself: a download cache has the model and its data as links to two files of one folder."""
    place = PurePosixPath(location)
    file = path.parent / place
    wrong = not location or place.is_absolute() or ".." in place.parts or "\\" in location or "\0" in location
    if wrong or not any(file.resolve().is_relative_to(one) for one in (folder, path.resolve().parent)):
        raise BadFolder(
            f"{path}: the data of tensor '{tensor}' is said to lie at {location!r}, outside the model folder; "
            "external data must be a plain file inside it: save the model again with its data beside it, or put the "
            "file itself in the place of a link"
        )
    if not file.is_file():
        raise BadFolder(f"{path}: the data of tensor '{tensor}' should lie in {file}, which does not exist")
    return file
