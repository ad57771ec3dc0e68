"""Type-transparent ops: they give the same numbers whether they run before a rounding to half or after it.

``round(op(x)) == op(round(x))``, so that such an op may run in either precision without changing a result.
Movements only place values elsewhere (or flip their sign): equal bit for bit. Selections pick one of their
values, or a bound that half represents, by its order, which rounding keeps: equal but for the sign of a
zero (a negative value that underflows is −0 if it is rounded first and may be +0 if not).
"""

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ...policy.classes import Trait, has


def is_transparent(node: Node, half: torch.dtype, signs_of_zero_matter: bool) -> bool:
    """Whether a node may run in FP32 or in ``half`` alike. Selections may not where signs of zero matter."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    name = target._schema.name.removeprefix("aten::")
    listed = has(name, Trait.MOVES) or (has(name, Trait.SELECTS) and not signs_of_zero_matter)
    return listed and _scalars_are_exact(node, target, half)


def distinguishes_signs_of_zero(graph: Graph) -> bool:
    """Whether some op gives different answers for −0 and +0 (beyond the sign of a zero)."""
    return any(_distinguishes(node) for node in graph.nodes if isinstance(node.target, OpOverload))


def _distinguishes(node: Node) -> bool:
    name = str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]
    _, second = (*node.args, None, None)[:2]
    if has(name, Trait.DIVIDES):
        return isinstance(second, Node) and second.op != "get_attr"
    if name == "pow" and isinstance(second, int | float):
        return second < 0
    return has(name, Trait.SIGNED_ZERO)


def _scalars_are_exact(node: Node, op: OpOverload, half: torch.dtype) -> bool:
    """Whether half represents each number that may come out: fill values, bounds."""
    for position, argument in enumerate(op._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        is_value = "number" in str(argument.type).lower() or (argument.name == "value" and given is not None)
        if not is_value or given is None:
            continue
        if (
            not isinstance(given, int | float)
            or torch.tensor(given, dtype=torch.float64).to(half).item() != given
        ):
            return False
    return True
