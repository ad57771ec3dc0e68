"""Batch norms folded into the half layer before them, for the ONNX form.

ONNX has no batch norm of half data with FP32 statistics: written out it is an FP32 island between two casts, which no
runtime fuses with its convolution. Folded, both are one half node, as runtimes make of the FP32 file. The weights are
rounded once more and the norm's input not at all; the gate judges the file as it is written.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from ....models.program import with_graph

_ATEN = torch.ops.aten
_NORM = _ATEN.batch_norm.default  # input, weight, bias, mean, variance, training, momentum, eps, cudnn
# The axis of the weight that has the layer's outputs.
_OUTPUT_AXES: Mapping[Any, int] = {
    _ATEN.conv1d.default: 0, _ATEN.conv2d.default: 0, _ATEN.conv3d.default: 0, _ATEN.linear.default: 0,
    _ATEN.conv_transpose1d.default: 1, _ATEN.conv_transpose2d.input: 1, _ATEN.conv_transpose3d.input: 1,
}  # fmt: skip
_GROUPS = 6  # the place of `groups` among the arguments of a transposed convolution


def with_norms_folded(program: ExportedProgram) -> ExportedProgram:
    """The program with each such norm folded; itself where it has none. The given program stays as it is."""
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
