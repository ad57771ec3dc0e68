"""Work on weights that is done once, at conversion, instead of at every request."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ....models.engines.arrays import to_numpy, to_torch
from ....models.program import walk
from ...policy import weights
from ...policy.weights import IN_RANGE
from .aliases import changed_in_place

SHARED = "__half"  # suffix of the half copy of a weight that FP32 nodes read as well


def fold_constants(module: GraphModule, foldable: Callable[[Node], bool]) -> GraphModule:
    """Compute the values that depend on weights alone (transposed, sliced, reshaped weights), where ``foldable``
    allows.

    Strides are kept: another layout may take another kernel, and with it another rounding.
    """
    changed = changed_in_place(module.graph)
    for node in list(module.graph.nodes):
        if not _is_constant(node) or node in changed or not foldable(node):
            continue
        if isinstance(value := _evaluate(module, node), Tensor):
            name = f"folded_{node.name}"
            module.register_buffer(name, value.detach())
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
            module.graph.erase_node(node)
    drop_unread(module)
    return module


def fold_casts(module: GraphModule, uses: Mapping[str, set[torch.dtype]], half: torch.dtype) -> GraphModule:
    """Store each weight in the dtype it is read in: once where all readers agree, twice where they differ.

    ``uses``: weight name → dtypes it is read in. Tied weights stay tied, transposed ones too.
    """
    rounded: dict[int, Tensor] = {}
    guards = {str(node.target) for node in module.graph.nodes if IN_RANGE in node.meta}
    for name, dtypes in uses.items():
        if half not in dtypes:
            continue
        weight = attrgetter(name)(module)
        tensor = _rounded(weight.detach(), half, rounded)
        tensor = in_range(weight.detach(), tensor) if name in guards else tensor
        if dtypes == {half}:
            _set_attribute(module, name, tensor, isinstance(weight, nn.Parameter))
        else:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_buffer(last + SHARED, tensor)
    return module


def in_range(original: Tensor, half: Tensor) -> Tensor:
    """`policy.weights.in_range` of tensors."""
    return to_torch(weights.in_range(to_numpy(original), to_numpy(half)))


def half_copy(module: nn.Module, path: str) -> Tensor | None:
    """The half copy of a weight that is read in both precisions."""
    owner, _, last = path.rpartition(".")
    return getattr(module.get_submodule(owner), last + SHARED, None)


def _rounded(weight: Tensor, half: torch.dtype, known: dict[int, Tensor]) -> Tensor:
    """``weight`` in ``half``, with the same strides; all weights that fill one storage share the rounded one."""
    storage = weight.untyped_storage()
    if storage.nbytes() != weight.numel() * weight.element_size() or not _is_dense(weight):
        return weight.to(half)
    if (key := storage._cdata) not in known:
        known[key] = weight.as_strided((weight.numel(),), (1,), 0).to(half)
    return known[key].as_strided(weight.shape, weight.stride(), 0)


def _is_dense(tensor: Tensor) -> bool:
    """True if some order of the axes is contiguous."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(axes).is_contiguous()


def drop_unread(module: GraphModule) -> None:
    """Remove weights that no node reads."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    read = {
        name.removesuffix(node.name) + str(node.target)
        for name, node in walk(module)
        if node.op == "get_attr"
    }
    for path, owner in list(module.named_modules()):
        for name in [*owner._parameters, *owner._buffers]:
            if (f"{path}.{name}" if path else name) not in read:
                delattr(owner, name)
    module.recompile()


def _is_constant(node: Node) -> bool:
    parents = node.all_input_nodes
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and bool(parents)
        and all(parent.op == "get_attr" for parent in parents)
    )


def _evaluate(module: GraphModule, node: Node) -> Any:
    def weight(parent: Node) -> Any:
        return attrgetter(str(parent.target))(module)

    with torch.no_grad():
        return node.target(*map_arg(node.args, weight), **map_arg(node.kwargs, weight))  # type: ignore[operator]


def _set_attribute(module: nn.Module, path: str, tensor: Tensor, is_parameter: bool) -> None:
    owner, _, name = path.rpartition(".")
    place = module.get_submodule(owner)
    if is_parameter:
        place.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(place, name, tensor)
