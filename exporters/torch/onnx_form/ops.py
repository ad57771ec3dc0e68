"""Ops that not all ONNX providers support, replaced by simpler ones.

batch_norm with half data and FP32 statistics is folded into the layer before it, or becomes an explicit FP32 island
where that cannot be; attention with a mask becomes matmul, add, softmax, matmul (torch.onnx cannot export it with a
free batch). A split into parts of a computed size becomes slices: torch.onnx writes a sequence, which few engines take.
"""

import copy
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ....models.program import walk, with_graph
from ..autocast.attention import attention
from ..autocast.surgery import Work, fake_mode, put_in_place, traced

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


_ATEN = torch.ops.aten
_NORM = _ATEN.batch_norm.default  # input, weight, bias, mean, variance, training, momentum, eps, cudnn
# The axis of the weight that has the layer's outputs.
_OUTPUT_AXES: Mapping[Any, int] = {
    _ATEN.conv1d.default: 0, _ATEN.conv2d.default: 0, _ATEN.conv3d.default: 0, _ATEN.linear.default: 0,
    _ATEN.conv_transpose1d.default: 1, _ATEN.conv_transpose2d.input: 1, _ATEN.conv_transpose3d.input: 1,
}  # fmt: skip
_GROUPS = 6  # the place of `groups` among the arguments of a transposed convolution


def with_norms_folded(program: ExportedProgram) -> ExportedProgram:
    """The program with each batch norm folded into the half layer before it; itself where it has none. The given
    program stays as it is.

    ONNX has no batch norm of half data with FP32 statistics: written out it is an FP32 island between two casts, which
    no runtime fuses with its convolution. Folded, both are one half node, as runtimes make of the FP32 file. The
    weights are rounded once more and the norm's input not at all; the gate judges the file as it is written.
    """
    module = copy.deepcopy(program.graph_module)  # it holds no weights
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    weights = dict(program.state_dict)
    norms = [node for node in module.graph.nodes if _is_foldable(node)]
    folded = [node for node in norms if _fold(node, names, weights)]
    if not folded:
        return program
    module.recompile()
    return with_graph(program, module, weights)


def _is_foldable(node: Node) -> bool:
    """A norm of half data with fixed FP32 statistics, after a half layer that nothing else reads."""
    if node.target is not _NORM or node.args[5]:
        return False
    layer, mean = node.args[0], node.args[3]
    if not isinstance(layer, Node) or not isinstance(mean, Node) or len(layer.users) != 1:
        return False
    value = layer.meta["val"]
    if layer.target not in _OUTPUT_AXES or value.dtype == mean.meta["val"].dtype:
        return False
    if layer.target is _ATEN.linear.default:
        return value.ndim == 2  # else the norm's channels are not the layer's outputs
    grouped = len(layer.args) > _GROUPS and layer.args[_GROUPS] != 1
    return _OUTPUT_AXES[layer.target] == 0 or not grouped


def _fold(norm: Node, names: Mapping[str, str], weights: dict[str, Tensor]) -> bool:
    """Fold one norm; False, and nothing is changed, where the weights are shared, unknown, or leave half's range.

    The new bias takes the place of the norm's bias, or of its mean where the norm has none.
    """
    layer, scale, shift, mean, variance = norm.args[0], *norm.args[1:5]
    assert isinstance(layer, Node)
    weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
    place = mean if shift is None else shift
    given = [node for node in (weight, bias, scale, shift, mean, variance) if isinstance(node, Node)]
    if any(names.get(node.name) not in weights for node in given):
        return False
    assert isinstance(weight, Node) and isinstance(place, Node)
    if len(weight.users) != 1 or len(place.users) != 1:
        return False

    def held(node: Any, missing: float) -> Tensor:
        return (
            weights[names[node.name]].double() if isinstance(node, Node) else torch.tensor(missing).double()
        )

    eps = norm.args[7]
    assert isinstance(eps, float)
    factor = held(scale, 1.0) / (held(variance, 1.0) + eps).sqrt()
    before = weights[names[weight.name]]
    shape = [1] * before.ndim
    shape[_OUTPUT_AXES[layer.target]] = -1
    after = (before.double() * factor.reshape(shape)).to(before.dtype)
    new_bias = ((held(bias, 0.0) - held(mean, 0.0)) * factor + held(shift, 0.0)).to(before.dtype)
    if not (after.isfinite().all() and new_bias.isfinite().all()):
        return False
    if after.abs().max() < torch.finfo(after.dtype).tiny:  # all have fewer digits than half's
        return False
    weights[names[weight.name]] = torch.nn.Parameter(after, requires_grad=False)
    _replace(place, names[place.name], new_bias, weights)
    layer.args = (*layer.args[:2], place, *layer.args[3:])
    norm.replace_all_uses_with(layer)
    norm.graph.erase_node(norm)
    return True


def _replace(place: Node, name: str, value: Tensor, weights: dict[str, Tensor]) -> None:
    is_parameter = isinstance(weights[name], torch.nn.Parameter)
    weights[name] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
    place.meta["val"] = place.meta["val"].to(value.dtype)
