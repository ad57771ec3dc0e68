"""Replaces operations that no archive may have by others with the same results.

Runs in the child. The result is compared with the module like all of the program.
"""

import operator

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

_ATEN = torch.ops.aten
# Uninitialised memory becomes zeros: a module whose answers depend on it has no defined answer. What torch.tensor makes
# in forward is detached in place, which a view refuses, and constants that were read from an archive are views.
_WRITTEN = {
    _ATEN.empty.memory_format: _ATEN.zeros.default,
    _ATEN.empty_like.default: _ATEN.zeros_like.default,
    _ATEN.new_empty.default: _ATEN.new_zeros.default,
    _ATEN.detach_.default: _ATEN.detach.default,
}
_UNCHECKED_NORMS = (_ATEN._native_batch_norm_legit_no_training.default, _ATEN.native_batch_norm.default)


def substitute(program: ExportedProgram) -> None:
    """Change the program in place."""
    for part in list(program.graph_module.modules()):
        if not isinstance(part, GraphModule):
            continue
        for node in list(part.graph.nodes):
            if node.target in _WRITTEN:
                _written(node)
            elif node.target is _ATEN.as_strided.default:
                _over_a_copy(node)
            elif node.target in _UNCHECKED_NORMS:
                _checked_norm(program, node)
        part.graph.lint()
        part.recompile()


def _written(node: Node) -> None:
    if node.target is _ATEN.empty.memory_format:
        if node.kwargs.get("memory_format") not in (None, torch.contiguous_format):
            return
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}
    node.target = _WRITTEN[node.target]  # type: ignore[index]


def _over_a_copy(node: Node) -> None:
    """Give ``as_strided`` a copy of its tensor, for it may read all of the tensor's storage."""
    tensor = node.args[0]
    assert isinstance(tensor, Node)
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(_ATEN.clone.default, (tensor,))
    copy.meta = dict(tensor.meta)
    node.update_arg(0, copy)


def _checked_norm(program: ExportedProgram, node: Node) -> None:
    """Replace `native_batch_norm`, which does not check the sizes of its weights, by `batch_norm`, which does."""
    if node.target is _ATEN.native_batch_norm.default:
        training, (momentum, eps) = node.args[5], node.args[6:8]
    else:
        training, (momentum, eps) = False, node.args[5:7]
    results = list(node.users)
    if training or any(one.target is not operator.getitem or one.args[1] != 0 for one in results):
        return
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(
            _ATEN.batch_norm.default, (*node.args[:5], False, momentum, eps, False)
        )
    for result in results:
        norm.meta = dict(result.meta)
        program.graph_signature.replace_all_uses(result.name, norm.name)
        result.replace_all_uses_with(norm)
        node.graph.erase_node(result)
    node.graph.erase_node(node)
