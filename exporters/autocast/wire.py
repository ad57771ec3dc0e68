"""Half on the wire: a whole program that takes and gives half, and computes in FP32 in between.

The casts become part of the whole, so every form takes and gives the same, and answers are judged as callers
get them. In the half program they vanish wherever the first and last ops are half.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputKind, TensorArgument
from torch.fx import GraphModule, Node

from ...models.spec import ModelSpec, TensorSpec

WIRES = {"fp16": ("FP16", torch.float16), "bf16": ("BF16", torch.bfloat16)}


def wired(
    program: ExportedProgram, spec: ModelSpec, io_dtype: str, example: Sequence[Tensor]
) -> tuple[ExportedProgram, ModelSpec, list[Tensor]]:
    """Program, spec and example (one tensor per input) with FP32 inputs and outputs in ``io_dtype``.

    ``io_dtype``: ``fp32`` (all stays), ``fp16`` or ``bf16``. Integers, booleans and FP64 stay what they are.
    """
    if io_dtype not in WIRES:
        return program, spec, list(example)
    datatype, dtype = WIRES[io_dtype]
    module = copy.deepcopy(program.graph_module)  # it holds no weights
    _take(module, set(program.graph_signature.user_inputs), dtype)
    signature = _give(module, program.graph_signature, dtype)
    module.recompile()
    inputs, outputs = (
        tuple(_wired(tensor, datatype) for tensor in tensors) for tensors in (spec.inputs, spec.outputs)
    )
    tensors = [tensor.to(one.type.torch) for tensor, one in zip(example, inputs, strict=True)]
    return program._update(module, signature), replace(spec, inputs=inputs, outputs=outputs), tensors


def _wired(tensor: TensorSpec, datatype: str) -> TensorSpec:
    return replace(tensor, datatype=datatype) if tensor.datatype == "FP32" else tensor


def _take(module: GraphModule, inputs: set[object], dtype: torch.dtype) -> None:
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        for node in placeholders:
            if node.name in inputs and node.meta["val"].dtype == torch.float32:
                wide = graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32))
                wide.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
                node.meta["val"] = node.meta["val"].to(dtype)


def _give(module: GraphModule, signature: ExportGraphSignature, dtype: torch.dtype) -> ExportGraphSignature:
    graph = module.graph
    output = graph.output_node()
    given: list[Node] = []
    with graph.inserting_before(output):
        for node, kind in zip(output.args[0], (one.kind for one in signature.output_specs), strict=True):  # type: ignore[arg-type]
            assert isinstance(node, Node)
            if kind is OutputKind.USER_OUTPUT and node.meta["val"].dtype == torch.float32:
                wide, node = node, graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
                node.meta["val"] = wide.meta["val"].to(dtype)
            given.append(node)
    output.args = (tuple(given),)
    specs = [
        replace(one, arg=TensorArgument(node.name)) if isinstance(one.arg, TensorArgument) else one
        for one, node in zip(signature.output_specs, given, strict=True)
    ]
    return ExportGraphSignature(list(signature.input_specs), specs)
