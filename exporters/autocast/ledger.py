"""The weights of a captured program that are read in half: the error of rounding each, and which stay FP32.

A weight over budget (`exporters/policy/weights.py`) is read in FP32 by every node, and the plan says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...models.program import duplicate, walk
from ..policy.weights import Entry, measure
from .dtypes import Typing
from .folding import attribute, fold_constants
from .operands import readers
from .plan import Kept, PrecisionPlan, foldable, is_mutable, op_name


@dataclass(frozen=True, slots=True)
class Ledger:
    entries: tuple[Entry, ...]

    def to_json(self) -> list[dict[str, Any]]:
        return [entry.to_json() for entry in self.entries]


def weigh(
    module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor]
) -> tuple[Ledger, PrecisionPlan]:
    """The ledger of all weights that are read in half, and the plan with the readers of unfit ones in FP32.

    ``module`` is the prepared whole and is not changed; ``example`` has one tensor per input. A value that depends on
    weights alone and is computed at conversion (a transposed weight) has its node's name.
    """
    graph = fold_constants(duplicate(module), lambda node: foldable(plan, node))
    dtypes, nodes = Typing(graph, example).under(plan), dict(walk(graph))
    entries: dict[str, Entry] = {}
    kept: dict[str, Kept] = {}
    for node in graph.graph.nodes:
        weight = attribute(graph, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            continue
        half = [name for name, dtype in readers(node, "", dtypes) if dtype == plan.dtype]
        if half and weight.dtype == torch.float32:
            entry = measure(_origin(module, str(node.target)), weight, plan.dtype)
            entries[entry.weight] = entry
            unfit = [n for n in half if entry.over_budget and n in plan.actions and not is_mutable(nodes[n])]
            kept |= {n: Kept(n, op_name(nodes[n]), entry.reason, entry.evidence) for n in unfit}
    return Ledger(tuple(entries.values())), plan.keeping(list(kept.values()))


def _origin(module: GraphModule, weight: str) -> str:
    """A weight's name; for a value computed from weights alone, their names and the op's."""
    made = {f"folded_{node.name}": node for node in module.graph.nodes}.get(weight)
    if made is None:
        return weight
    leaves, stack = set[str](), [made]
    while stack:
        node = stack.pop()
        stack += node.all_input_nodes
        leaves |= {str(node.target)} if node.op == "get_attr" else set()
    return f"{', '.join(sorted(leaves))} ({made.name})"
