"""The ONNX form: written from the very program that is the torch form, whole or half.

torch.onnx's optimiser stays off: it deletes ``+ eps`` for eps ≤ 1e-8 and ``* c`` for c near 1. What the
writer gets is the same program with two ops written in a form that every execution provider takes:
batch_norm with half data and FP32 statistics becomes an explicit FP32 island, and attention with a floating
bias becomes matmul, add, softmax, matmul.
"""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnx.inliner import inline_local_functions
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter

from ..models.errors import ExportFailed
from ..models.program import runnable
from ..models.spec import ModelSpec
from .trace import export_as_run

OPSET = 20
_SELF_CONTAINED_BELOW = 2**31 - 2**20  # protobuf's limit, with room for the graph itself


def write_onnx(
    program: ExportedProgram,
    spec: ModelSpec,
    path: Path,
    example: Sequence[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write ``program`` with the spec's names and order and with symbolic free dimensions.

    When this returns, the file has passed ``onnx.checker`` (full check), strict shape inference and a load
    by ONNX Runtime. Raises ExportFailed with the reason otherwise.
    """
    model = _exported(_for_onnx(program, spec, example), spec)
    model = inline_local_functions(model)
    _name(model, spec)
    for key, value in metadata.items():
        model.metadata_props.add(key=f"halfeven.{key}", value=value)
    if model.ByteSize() >= _SELF_CONTAINED_BELOW:
        raise ExportFailed(
            f"'{spec.name}' is {model.ByteSize() / 2**30:.1f} GiB as ONNX; files above 2 GiB need external data, "
            "which is not written yet: serve the torch form (--form torch)"
        )
    try:
        onnx.checker.check_model(model, full_check=True)
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
        onnx.save(model, path)
        _load(path)
    except Exception as error:
        raise ExportFailed(
            f"the ONNX form of '{spec.name}' is not valid: {str(error)[:800]}; serve the torch form (--form torch)"
        ) from error


class _ForOnnx(Interpreter):
    """Runs a program with the ops that ONNX providers do not take written out."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.batch_norm.default and _mixed(args):
            island = super().call_function(target, (args[0].float(), *args[1:]), kwargs)
            return island.to(args[0].dtype)
        if target is torch.ops.aten.scaled_dot_product_attention.default:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None:
                query, key, value = _equal_heads(args, kwargs)
                return _attention(query, key, value, _bias(mask, query), kwargs.get("scale"))
        return super().call_function(target, args, kwargs)


def _mixed(args: Sequence[Any]) -> bool:
    return len({arg.dtype for arg in args[:5] if isinstance(arg, Tensor)}) > 1


def _equal_heads(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value ``[…, heads, length, width]``; grouped-query heads are repeated."""
    query, key, value = args[:3]
    if kwargs.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    return query, key, value


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as what is added to the scores: true is 0, false is -inf; a floating one is that already."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """softmax(q·kᵀ·scale + bias)·v, rows that are masked whole giving NaN-free zeros as torch's kernels do."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1) + bias
    highest = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1)
    return torch.where(highest == -math.inf, torch.zeros_like(weights), weights) @ value


def _for_onnx(program: ExportedProgram, spec: ModelSpec, example: Sequence[Tensor]) -> ExportedProgram:
    graph: GraphModule = runnable(program)
    return export_as_run(graph, lambda *tensors: _ForOnnx(graph).run(*tensors), spec, example)


def _exported(program: ExportedProgram, spec: ModelSpec) -> onnx.ModelProto:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
    try:
        with warnings.catch_warnings():
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
    return exported.model_proto


def _name(model: onnx.ModelProto, spec: ModelSpec) -> None:
    """Give inputs and outputs the spec's names and their free dimensions a symbol each."""
    _make_outputs_differ(model)
    renamed: dict[str, str] = {}
    for values, tensors in ((model.graph.input, spec.inputs), (model.graph.output, spec.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            renamed[value.name] = tensor.name
    _make_room(model, set(renamed.values()) - set(renamed), renamed)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for values, tensors in ((model.graph.input, spec.inputs), (model.graph.output, spec.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            value.name = tensor.name
            for axis, (dim, found) in enumerate(
                zip(tensor.shape, value.type.tensor_type.shape.dim, strict=True)
            ):
                if not dim.fixed:
                    batch = spec.batched and axis == 0
                    found.dim_param = "batch" if batch else dim.name or f"{tensor.name}_{axis}"


def _make_outputs_differ(model: onnx.ModelProto) -> None:
    """An output that is an input, or another output, becomes a value of its own: it has a name of its own."""
    taken = {value.name for value in model.graph.input}
    for index, value in enumerate(model.graph.output):
        if value.name in taken:
            own = f"{value.name}__output_{index}"
            model.graph.node.append(onnx.helper.make_node("Identity", [value.name], [own]))
            value.name = own
        taken.add(value.name)


def _make_room(model: onnx.ModelProto, wanted: set[str], renamed: dict[str, str]) -> None:
    """An inner value that has the name of an input or output gets another."""
    inner = [name for node in model.graph.node for name in node.output]
    inner += [tensor.name for tensor in model.graph.initializer]
    for name in wanted & set(inner):
        renamed[name] = f"{name}__inner"
    for values in (model.graph.initializer, model.graph.value_info):
        for value in values:
            value.name = renamed.get(value.name, value.name)


def _load(path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
