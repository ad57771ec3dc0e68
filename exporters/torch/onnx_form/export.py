"""The ONNX form: written from the very program that is the torch form, original or half.

torch.onnx's optimiser stays off: it deletes ``+ eps`` for eps ≤ 1e-8 and ``* c`` for c near 1. Weights are
held once until the file is written, and the file is checked where it lies.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    InlinePass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from onnxscript.optimizer import fold_constants
from torch.export import ExportedProgram

from ....models.errors import ExportFailed, OrderEnded
from ....models.spec.spec import ModelSpec
from ...onnx.output_names import output_names
from ...onnx.reading.large_files import DATA, SELF_CONTAINED_BELOW, remove_onnx
from .check import check_file
from .decompositions import decomposed_where_needed, looked_up_once
from .ops import written_out

OPSET = 20
_TAKE_INT64_ALONE = ("ScatterND", "GatherND")  # as indices; torch writes others of INT32 (in `istft`)
BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def write_onnx(program: ExportedProgram, spec: ModelSpec, path: Path, metadata: Mapping[str, str]) -> None:
    """Write ``program`` with the spec's names (`output_names`) and order and with symbolic free dimensions.

    Weights of 2 GiB and more stand beside it, in ``<path>.data``. When this returns, the file has passed
    ``onnx.checker`` (full check, which infers all shapes strictly) and a load by ONNX Runtime. Raises
    ExportFailed with the reason otherwise; then no file is left.
    """
    model = _exported(written_out(program), spec)
    name_as(model, spec)
    for key, value in metadata.items():
        model.metadata_props[f"halfeven.{key}"] = value
    data = path.with_name(path.name + DATA)
    try:
        _save(model, path, data)
        bodies = any(attr.type in BODIES for node in model.graph for attr in node.attributes.values())
        del model
        check_file(path, bodies)
    except OrderEnded:
        raise
    except Exception as error:
        remove_onnx(path)
        raise ExportFailed(
            f"the ONNX form of '{spec.name}' is not valid: {str(error)[:800]}; serve the torch form (--form torch)"
        ) from error


def _exported(program: ExportedProgram, spec: ModelSpec) -> ir.Model:
    try:
        # torch.onnx warns that torchvision is not installed.
        with _without_warnings("torch.onnx"), looked_up_once(), decomposed_where_needed():
            exported = torch.onnx.export(
                program, dynamo=True, optimize=False, verbose=False, opset_version=OPSET
            )
    except Exception as error:
        reason = str(error.__cause__ or error)
        raise ExportFailed(
            f"'{spec.name}' cannot be written as ONNX: {reason[:800]}; serve the torch form (--form torch)"
        ) from error
    assert exported is not None
    model = exported.model
    for change in (InlinePass(), RemoveUnusedOpsetsPass(), ClearMetadataAndDocStringPass()):
        change(model)  # what is cleared are the source lines of each node, paths of this machine
    fold_known(model)  # and infers the types that are asked for next
    _widen_indices(model)
    return model


def _widen_indices(model: ir.Model) -> None:
    for node in list(model.graph.all_nodes()):
        indices = node.inputs[1] if node.op_type in _TAKE_INT64_ALONE else None
        if indices is not None and indices.dtype is ir.DataType.INT32:
            cast = ir.node("Cast", [indices], {"to": ir.DataType.INT64})
            cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.INT64, indices.shape
            assert node.graph is not None
            node.graph.insert_before(node, cast)
            node.replace_input_with(1, cast.outputs[0])


def _save(model: ir.Model, path: Path, data: Path) -> None:
    weights = sum(
        value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value
    )
    if weights >= SELF_CONTAINED_BELOW:
        ir.save(model, path, external_data=data.name)
    else:
        _save_streaming(model, path)


def _save_streaming(model: ir.Model, path: Path) -> None:
    """One file, holding one weight at a time in memory.

    A protobuf message may be written in pieces: readers merge a sub-message that comes again, and append its
    repeated fields (protobuf encoding, "Last One Wins"). So each weight is a piece with a graph of its own.
    """
    weights = list(model.graph.initializers.items())
    model.graph.initializers.clear()
    with path.open("wb") as file:
        file.write(ir.serde.serialize_model(model).SerializeToString())
        for _, value in weights:
            assert value.const_value is not None
            piece = onnx.ModelProto()
            piece.graph.initializer.append(ir.serde.serialize_tensor(value.const_value))
            file.write(piece.SerializeToString())


SMALL = 1 << 14  # elements: constants up to this size are made whatever they are made of
_CUTS = frozenset({"Slice", "Concat", "Split", "Unsqueeze", "Squeeze", "Reshape"})
# exact, or rounded as IEEE says, in every library
_EXACT = _CUTS | {
    "Shape", "Size", "Gather", "Transpose", "Expand", "Identity", "Cast", "CastLike", "Add", "Sub", "Mul", "Div",
    "Sqrt", "Neg",
}  # fmt: skip


def fold_known(model: ir.Model) -> None:
    """Fold in place what torch.onnx leaves to be computed at every call although it is known beforehand: the sizes by
    which it cuts the weights of an LSTM, the scale of an attention. Answers and the names of inputs and outputs stay.
    """
    with _without_warnings("onnxscript"):
        # onnxscript 0.7 fails at a SplitToSequence into parts of a computed size. What it folded before stays.
        with suppress(RuntimeError):
            fold_constants(model, onnx_shape_inference=True, should_fold=_is_worth_it)
        # sequences that were split up, sizes that no node reads any more
        RemoveUnusedNodesPass()(model)


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """In this block Python's warnings are not shown, and of the logger ``name`` only errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _is_worth_it(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in _EXACT:
        return False
    large = [value for value in node.inputs if value is not None and _size(value) > SMALL]
    return not large or (node.op_type in _CUTS and all(_is_only_cut(value) for value in large))


def _is_only_cut(value: ir.Value) -> bool:
    """True if the pieces of a large constant would replace it, not be stored beside it."""
    return all(node.op_type in _CUTS for node, _ in value.uses())


def _size(value: ir.Value) -> int:
    return value.const_value.size if value.const_value is not None else 0


def name_as(model: ir.Model, spec: ModelSpec) -> None:
    """Give inputs and outputs the spec's names and their free dimensions a symbol each."""
    graph = model.graph
    _make_outputs_differ(graph)
    outputs = output_names(spec)
    tensors = [*spec.inputs, *(replace(tensor, name=outputs[tensor.name]) for tensor in spec.outputs)]
    ends = list(zip([*graph.inputs, *graph.outputs], tensors, strict=True))
    _make_room(graph, {id(value): tensor.name for value, tensor in ends})
    symbols: dict[str, str] = {}
    for value, tensor in ends:
        value.name = tensor.name
        assert value.shape is not None
        for axis, (dim, found) in enumerate(zip(tensor.shape, value.shape, strict=True)):
            if dim.fixed:
                continue
            name = "batch" if spec.batched and axis == 0 else dim.name or f"{tensor.name}_{axis}"
            if isinstance(found, ir.SymbolicDim) and found.value is not None:
                symbols.setdefault(str(found.value), name)
            value.shape[axis] = name
    _rename(graph, symbols)


def _make_outputs_differ(graph: ir.Graph) -> None:
    """An output that is an input, a weight or another output becomes a value of its own: it has its own name."""
    taken = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for index, value in enumerate(graph.outputs):
        if id(value) in taken:
            node = ir.node("Identity", [value])
            own = node.outputs[0]
            own.name, own.type, own.shape = f"{value.name}__output_{index}", value.type, value.shape
            if value.shape is not None:
                own.shape = ir.Shape(list(value.shape))
            graph.append(node)
            graph.outputs[index] = own
        taken.add(id(graph.outputs[index]))


def _make_room(graph: ir.Graph, ends: Mapping[int, str]) -> None:
    """An inner value that has the name of an input or output gets another."""
    wanted = set(ends.values())
    for value in _values(graph):
        if value.name in wanted and id(value) not in ends:
            value.name = f"{value.name}__inner"


def _rename(graph: ir.Graph, symbols: Mapping[str, str]) -> None:
    """Free dimensions of inner values have the names that the inputs and outputs have for them."""
    for value in _values(graph):
        if value.shape is None or value.shape.is_static():
            continue
        value.shape = ir.Shape([_renamed(dim, symbols) for dim in value.shape])


def _renamed(dim: int | ir.SymbolicDim, symbols: Mapping[str, str]) -> int | str | ir.SymbolicDim:
    return symbols.get(str(dim.value), dim) if isinstance(dim, ir.SymbolicDim) else dim


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value, those of nested graphs included."""
    for one in (graph, *graph.subgraphs()):
        yield from one.inputs
        yield from one.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
