"""The ONNX form: written from the very program that is the torch form, original or half.

torch.onnx's optimiser stays off: it deletes ``+ eps`` for eps ≤ 1e-8 and ``* c`` for c near 1. Weights are
held once until the file is written, and the file is checked where it lies.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass, RemoveUnusedOpsetsPass
from torch.export import ExportedProgram

from ....models.errors import ExportFailed, OrderEnded
from ....models.spec import ModelSpec
from ...onnx.reading.large_files import DATA, SELF_CONTAINED_BELOW
from .check import check_file
from .decompositions import decomposed_where_needed
from .folding import fold_known
from .lookups import looked_up_once
from .names import name_as
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


def remove_onnx(path: Path) -> None:
    """Delete the file, and that of its weights where they stand beside it."""
    for file in (path, path.with_name(path.name + DATA)):
        file.unlink(missing_ok=True)


def _exported(program: ExportedProgram, spec: ModelSpec) -> ir.Model:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
    try:
        with warnings.catch_warnings(), looked_up_once(), decomposed_where_needed():
            warnings.simplefilter("ignore")
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
