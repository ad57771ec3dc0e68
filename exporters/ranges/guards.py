"""Guards against zero: a small constant added to, or used as the minimum of, a divisor or the argument of a root or
logarithm.

``x + 1e-12`` and ``x.clamp(min=1e-8)`` guard nothing in FP16, which rounds both constants to zero.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ...models.program import walk
from ..policy.classes import Trait, class_of, has
from ..policy.weights import IN_RANGE, in_range, rounded
from .divisions import Guard, reaches_a_division

LARGEST = 1e-3  # a constant above it is an offset, not a guard
_OF_TWO: dict[Any, str] = {torch.ops.aten.max.other: "maximum", torch.ops.aten.min.other: "minimum"}


def find_guards(module: GraphModule, half: str = "fp16") -> tuple[Guard, ...]:
    """Every guard of an original program, in the order of `walk`, control-flow bodies included."""
    found = []
    for name, node in walk(module):
        guarded, value = _guard(node)
        prefix = name.removesuffix(node.name)
        if guarded is not None and (readers := [prefix + reader.name for reader in _readers(node)]):
            original = np.asarray(value, np.float32)
            in_half = rounded(original, half)
            if any(IN_RANGE in source.meta for source in node.all_input_nodes):
                in_half = in_range(original, in_half)
            found.append(Guard(name, prefix + guarded.name, value, float(in_half), tuple(readers)))
    return tuple(found)


def lift_guards(module: GraphModule, half: str) -> None:
    """Make constants of the guards of a prepared original program that would vanish in half, in place.

    Half's least number guards a division as well (`in_range`); a number in the code could not be another in half.
    """
    for node in list(module.graph.nodes):
        guarded, value = _guard(node)
        vanishes = guarded is not None and float(rounded(np.asarray(value, np.float32), half)) == 0.0
        if not vanishes or not reaches_a_division(node, _divisions):
            continue
        held = next((arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"), None)
        if held is not None and all(_guard(user)[0] is not None for user in held.users):
            held.meta[IN_RANGE] = True
        elif node.target in _LIFTED and not any(node.kwargs.get(key) for key in ("max", "alpha")):
            path = f"guard_{node.name}"
            module.register_buffer(path, torch.tensor(value))
            with module.graph.inserting_before(node):
                held = module.graph.get_attr(path)
            held.meta[IN_RANGE] = True
            node.target, node.args, node.kwargs = _LIFTED[node.target], (guarded, held), {}
    module.recompile()


_LIFTED = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.clamp.default: torch.ops.aten.maximum.default,
    torch.ops.aten.clamp_min.default: torch.ops.aten.maximum.default,
}


def _divisions(node: Node) -> Iterator[tuple[Node, str, bool]]:
    for user in node.users:
        name = aten_name(user)
        divides = has(name, Trait.DIVIDES) and user.args[1] is node
        yield user, name, divides or class_of(name).name == "reciprocal"


def aten_name(node: Node) -> str:
    """``add`` for ``aten.add.Tensor``; the target's own name where it is not an ATen op; empty where it is not a call.

    ``max`` and ``min`` of two tensors are given as ``maximum`` and ``minimum``.
    """
    if node.op != "call_function":
        return ""
    if node.target in _OF_TWO:
        return _OF_TWO[node.target]
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    return str(getattr(node.target, "__name__", node.target))


def is_view(node: Node) -> bool:
    """True if a node's result is its first argument's memory, unchanged."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def constant(value: Any) -> float | None:
    """A number, or the number of a node that is a tensor of one constant element; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Node):
        return None
    if value.op == "get_attr":
        found = attrgetter(str(value.target))(value.graph.owning_module)
        return float(found) if isinstance(found, Tensor) and found.numel() == 1 else None
    name = aten_name(value)
    if name in ("full", "full_like", "new_full"):
        return constant(value.args[2 if name == "new_full" else 1])
    if name == "scalar_tensor":
        return constant(value.args[0])
    if has(name, Trait.COPIES) or is_view(value):
        return constant(value.args[0])
    return None


def _guard(node: Node) -> tuple[Node | None, float]:
    """The node that is guarded, and the constant; None as the node where it is not a guard."""
    name = aten_name(node)
    if not has(name, Trait.ADDS, Trait.FLOORS):
        return None, 0.0
    arguments = [*node.args[:2], *(node.kwargs[key] for key in ("min", "other") if key in node.kwargs)]
    tensors = [arg for arg in arguments if isinstance(arg, Node) and constant(arg) is None]
    values = [value for arg in arguments if (value := constant(arg)) is not None]
    if len(tensors) != 1 or not values:
        return None, 0.0
    value = -values[0] if name in ("sub", "sub_") else values[0]
    return (tensors[0], value) if 0.0 < value <= LARGEST else (None, 0.0)


def _readers(node: Node) -> Iterator[Node]:
    """Roots, logarithms and divisions that read a node, directly or through views that keep its numbers."""
    for user in node.users:
        name = aten_name(user)
        if has(name, Trait.COPIES) or is_view(user):
            yield from _readers(user)
        elif (
            has(name, Trait.ROOT)
            or (has(name, Trait.DIVIDES) and user.args[1] is node)
            or (name in ("pow", "pow_") and isinstance(user.args[1], int | float) and user.args[1] < 1)
        ):
            yield user
