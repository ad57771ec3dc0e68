"""Ops that not all ONNX providers support, replaced by simpler ones.

batch_norm with half data and FP32 statistics is folded into the layer before it, or becomes an explicit FP32 island
where that cannot be; attention with a mask becomes matmul, add, softmax, matmul (torch.onnx cannot export it with a
free batch).
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ....models.program import walk, with_graph
from ..autocast.attention import attention
from ..autocast.surgery import Work, fake_mode, put_in_place, traced
from .batch_norms import with_norms_folded

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def written_out(program: ExportedProgram) -> ExportedProgram:
    """The program with those ops replaced, in control-flow bodies too; itself where it has none."""
    program = with_norms_folded(program)
    module = copy.deepcopy(program.graph_module)  # it holds no weights
    nodes = [(node, work) for _, node in walk(module) if (work := _work(node)) is not None]
    if not nodes:
        return program
    mode = fake_mode(module)
    for node, work in nodes:
        owner, name = node.graph.owning_module, node.name
        assert isinstance(owner, GraphModule)
        inner = traced(node, owner, work, mode)
        if inner is not None:
            put_in_place(node, inner, owner)[
                -1
            ].name = name  # it may be an output: the signature has its name
            owner.recompile()
    return with_graph(program, module)


def _work(node: Node) -> Work | None:
    if node.target in _NORMS and _is_mixed(node):
        return partial(_in_fp32, node.target)
    if node.target is _ATTENTION and (node.kwargs.get("attn_mask") or node.args[3:4] not in ((), (None,))):
        return lambda args, kwargs: attention(*args, **kwargs)
    return None


def _is_mixed(node: Node) -> bool:
    values = [arg.meta["val"] for arg in node.args[:5] if isinstance(arg, Node)]
    return len({value.dtype for value in values}) > 1


def _in_fp32(norm: Any, args: Any, kwargs: Any) -> Tensor:
    return norm(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
