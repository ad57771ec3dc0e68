"""Ops that not all ONNX providers support, replaced by simpler ones.

batch_norm with half data and FP32 statistics becomes an explicit FP32 island; attention with a mask becomes
matmul, add, softmax, matmul (torch.onnx cannot export it with a free batch).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ....models.program import walk
from ..autocast.surgery import Work, fake_mode, put_in_place, traced

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def written_out(program: ExportedProgram) -> ExportedProgram:
    """The program with those ops replaced, in control-flow bodies too; itself where it has none."""
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
    return program._update(module, program.graph_signature)


def _work(node: Node) -> Work | None:
    if node.target in _NORMS and _is_mixed(node):
        return partial(_in_fp32, node.target)
    if node.target is _ATTENTION and (node.kwargs.get("attn_mask") or node.args[3:4] not in ((), (None,))):
        return _masked_attention
    return None


def _is_mixed(node: Node) -> bool:
    values = [arg.meta["val"] for arg in node.args[:5] if isinstance(arg, Node)]
    return len({value.dtype for value in values}) > 1


def _in_fp32(norm: Any, args: Any, kwargs: Any) -> Tensor:
    return norm(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)


def _masked_attention(args: Any, kwargs: Any) -> Tensor:
    mask = args[3] if len(args) > 3 else kwargs["attn_mask"]
    query, key, value = _equal_heads(args, kwargs)
    return _attention(query, key, value, _bias(mask, query), kwargs.get("scale"))


def _equal_heads(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value ``[…, heads, length, width]``; grouped-query heads are repeated."""
    query, key, value = args[:3]
    if kwargs.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    return query, key, value


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as numbers to add to the scores: true is 0, false is -inf; a floating mask has such numbers already."""
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
