"""Regions of a captured program become plain nodes: ``autocast``, ``no_grad`` and the like are taken in.

torch.export makes of each region a submodule under a higher-order op. A node from ``autocast(enabled=False)``,
or from a custom function whose inputs are cast to FP32, says so in ``node.meta["custom"]["halfeven_island"]``,
which an archive keeps: it is the user's own FP32. A region that asks for half is only taken in: the original is FP32.

The child uses this module too.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

ISLAND = "halfeven_island"
# The half dtype of a region that is off means nothing, so the child marks with it those that it opened itself.
CUSTOM_FWD = torch.float64
_REGION = torch.ops.higher_order.wrap_with_autocast
_MARKERS = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)
CONTROL_FLOW = ("cond", "while_loop", "scan", "map_impl")


def inline_regions(program: ExportedProgram) -> None:
    """Take every region in, also inside control flow."""
    for old, new in _visit(program.graph_module, ""):
        program.graph_signature.replace_all_uses(old, new)


def has_casts(program: ExportedProgram) -> bool:
    """True if a region that asks for half has left half values: on a CPU only one for the CPU does."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]
    found = [part.graph.find_nodes(op="call_function", target=_REGION) for part in parts]
    return any(node.args[0] == "cpu" and node.args[2] for nodes in found for node in nodes)


def foreign_op(node: Node) -> str | None:
    """The name of a higher-order op that has a body we do not know; None for every other node."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    return None if node.target.name() in CONTROL_FLOW else node.target.name()


def _visit(module: GraphModule, island: str) -> list[tuple[str, str]]:
    """Take in the regions of one graph and of its bodies; gives old name → new name in this graph."""
    renamed: list[tuple[str, str]] = []
    around = [island]  # with the regions that torch left as a pair of markers in the graph itself
    for node in list(module.graph.nodes):
        if node.target is torch.amp.autocast_mode._enter_autocast:
            around.append(_autocast(node.args))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            around.pop()
        elif node.op == "call_function":
            renamed += _take_in(module, node, around[-1])
    for node in reversed(list(module.graph.nodes)):
        if node.target in _MARKERS:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return renamed


def _take_in(module: GraphModule, node: Node, island: str) -> list[tuple[str, str]]:
    """Mark a node of an island; go into its bodies; inline it where it is a region."""
    inside = _region(node, island)
    if island and inside is None:
        node.meta["custom"] = {**node.meta.get("custom", {}), ISLAND: island}
    holders = [arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
    bodies = [(arg, getattr(module, str(arg.target), None)) for arg in holders]
    renamed: list[tuple[str, str]] = []
    for holder, body in bodies:
        if not isinstance(body, GraphModule):
            continue
        _visit(body, island if inside is None else inside)
        if inside is not None:
            renamed += _inline(module, node, body)
            if not holder.users:
                module.graph.erase_node(holder)
                delattr(module, str(holder.target))
    return renamed


def _region(node: Node, island: str) -> str | None:
    """The reason why a region's nodes are an FP32 island ("" where they are not); None for an op that is no region."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return island
    if node.target is _REGION:
        return _autocast(node.args)
    return None


def _autocast(args: Sequence[Any]) -> str:
    _, dtype, enabled = args[:3]
    if enabled:
        return ""
    return "custom_fwd(cast_inputs=float32)" if dtype is CUSTOM_FWD else "autocast(enabled=False)"


def _inline(owner: GraphModule, region: Node, body: GraphModule) -> list[tuple[str, str]]:
    """Put the body's nodes in the place of the region."""
    first = next(i for i, arg in enumerate(region.args) if isinstance(arg, Node) and arg.op == "get_attr")
    inputs = iter(region.args[first + 1 :])
    values: dict[Node, object] = {}
    results: object = ()
    with owner.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                results = map_arg(node.args[0], values.__getitem__)  # type: ignore[arg-type]
            elif node.op == "get_attr":
                values[node] = _moved(owner, body, node)
            else:
                values[node] = owner.graph.node_copy(node, values.__getitem__)  # type: ignore[arg-type]
    return _replace(region, results)


def _moved(owner: GraphModule, body: GraphModule, node: Node) -> Node:
    """A body or constant of the region's own, under a free name in its owner."""
    name = target = str(node.target)
    count = 0
    while hasattr(owner, name):
        count += 1
        name = f"{target}_{count}"
    setattr(owner, name, getattr(body, target))
    moved = owner.graph.get_attr(name)
    moved.meta = dict(node.meta)
    return moved


def _replace(region: Node, results: object) -> list[tuple[str, str]]:
    renamed: list[tuple[str, str]] = []
    for user in list(region.users):
        assert user.target is operator.getitem and isinstance(results, list | tuple), region.format_node()
        value = results[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(value, propagate_meta=False)
        if isinstance(value, Node):
            renamed.append((user.name, value.name))
        region.graph.erase_node(user)
    region.graph.erase_node(region)
    return renamed
