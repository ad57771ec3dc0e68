"""Ops that not all ONNX providers support, replaced by simpler ones.

batch_norm with half data and FP32 statistics is folded into the layer before it, or becomes an explicit FP32 island
where that cannot be; attention with a mask becomes matmul, add, softmax, matmul (torch.onnx cannot export it with a
free batch). A split into parts of a computed size becomes slices: torch.onnx writes a sequence, which few engines take.
"""

import copy
import operator
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ....models.program import walk, with_graph
from ..autocast.attention import attention
from ..autocast.surgery import Work, fake_mode, put_in_place, traced
from .batch_norms import with_norms_folded

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_CHUNK = torch.ops.aten.chunk.default
_SPLITS = (_CHUNK, torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default)


def written_out(program: ExportedProgram) -> ExportedProgram:
    """The program with those ops replaced, in control-flow bodies too; itself where it has none."""
    program = with_norms_folded(program)
    module = copy.deepcopy(program.graph_module)  # it holds no weights
    nodes = [(node, work) for _, node in walk(module) if (work := _work(node)) is not None]
    splits = [node for _, node in walk(module) if node.target in _SPLITS and _sizes_are_computed(node)]
    if not nodes and not splits:
        return program
    for node in splits:
        _slice_instead(node)
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


def _sizes_are_computed(split: Node) -> bool:
    sizes = split.args[1]
    if split.target is _CHUNK:
        assert isinstance(split.args[0], Node)
        return isinstance(split.args[0].meta["val"].shape[_axis(split)], SymInt)
    return isinstance(sizes, Node) or (
        isinstance(sizes, list | tuple) and any(isinstance(size, Node) for size in sizes)
    )


def _axis(split: Node) -> Any:
    return split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)


def _slice_instead(split: Node) -> None:
    """Replace a split node by one slice of the split tensor for each part; the parts keep their names."""
    whole, sizes, axis = split.args[0], split.args[1], _axis(split)
    with split.graph.inserting_before(split):
        if split.target is _CHUNK:  # of n rows in k parts each has ⌈n / k⌉, but the last
            rows = _computed(split, torch.ops.aten.sym_size.int, whole, axis)
            assert isinstance(sizes, int)
            sizes = _computed(
                split, operator.floordiv, _computed(split, operator.add, rows, sizes - 1), sizes
            )
        bounds: list[Any] = [0]
        for place in range(len(split.meta["val"])):
            size = sizes[place] if isinstance(sizes, list | tuple) else sizes
            bounds.append(_computed(split, operator.add, bounds[-1], size) if bounds[-1] != 0 else size)
    for part in list(split.users):
        place = part.args[1]
        assert isinstance(place, int)
        part.target = torch.ops.aten.slice.Tensor
        part.args = (whole, axis, bounds[place], bounds[place + 1])
    split.graph.erase_node(split)


def _computed(split: Node, operation: Any, *given: Any) -> Node:
    """A new node that computes a size from what is given, nodes or numbers."""
    made = split.graph.call_function(operation, given)
    made.meta["val"] = operation(*(one.meta["val"] if isinstance(one, Node) else one for one in given))
    return made


def _is_mixed(node: Node) -> bool:
    values = [arg.meta["val"] for arg in node.args[:5] if isinstance(arg, Node)]
    return len({value.dtype for value in values}) > 1


def _in_fp32(norm: Any, args: Any, kwargs: Any) -> Tensor:
    return norm(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
