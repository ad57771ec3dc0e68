"""Work on weights that is done once, at conversion, instead of at every request."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

SHARED = "__half"  # suffix of the half copy of a weight that FP32 nodes read as well


def fold_constants(module: GraphModule) -> GraphModule:
    """Compute what depends on weights alone (transposed, sliced, reshaped weights).

    Strides are kept: another layout may take another kernel, and with it another rounding.
    """
    for node in list(module.graph.nodes):
        if _is_constant(node) and isinstance(value := _evaluate(module, node), Tensor):
            name = f"folded_{node.name}"
            module.register_buffer(name, value.detach())
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
            module.graph.erase_node(node)
    drop_unread(module)
    return module


def fold_casts(module: GraphModule, uses: Mapping[str, set[torch.dtype]], half: torch.dtype) -> GraphModule:
    """Store each weight in the dtype it is read in: once where all readers agree, twice where they differ.

    ``uses``: weight name → dtypes it is read in. Tied weights stay tied.
    """
    rounded: dict[int, Tensor] = {}
    for name, dtypes in uses.items():
        weight = attribute(module, name)
        if half not in dtypes:
            continue
        tensor = rounded.setdefault(id(weight), weight.detach().to(half))
        if dtypes == {half}:
            _set_attribute(module, name, tensor, isinstance(weight, nn.Parameter))
        else:
            module.register_buffer(name.replace(".", "_") + SHARED, tensor)
    return module


def attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def drop_unread(module: GraphModule) -> None:
    """Forget weights that no node reads."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for path, owner in list(module.named_modules()):
        for name in [*owner._parameters, *owner._buffers]:
            if (f"{path}.{name}" if path else name) not in read:
                delattr(owner, name)
    module.recompile()


def _is_constant(node: Node) -> bool:
    def changes(other: Node) -> bool:
        return isinstance(other.target, OpOverload) and other.target._schema.is_mutable

    parents = node.all_input_nodes
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and not changes(node)
        and not any(changes(user) for user in node.users)
        and bool(parents)
        and all(parent.op == "get_attr" for parent in parents)
    )


def _evaluate(module: GraphModule, node: Node) -> Any:
    def weight(parent: Node) -> Any:
        return attribute(module, str(parent.target))

    with torch.no_grad():
        return node.target(*map_arg(node.args, weight), **map_arg(node.kwargs, weight))  # type: ignore[operator]


def _set_attribute(module: nn.Module, path: str, tensor: Tensor, is_parameter: bool) -> None:
    owner, _, name = path.rpartition(".")
    place = module.get_submodule(owner)
    if is_parameter:
        place.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(place, name, tensor)
