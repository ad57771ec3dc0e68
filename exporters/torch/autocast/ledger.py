"""The weights of a captured program that are read in half: the error of rounding each, and which stay FP32.

A weight over budget (`exporters/policy/weights.py`) is read in FP32 by every node, and the plan says why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from ml_dtypes import finfo
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ....models.engines.arrays import to_numpy
from ....models.program import duplicate, walk, writes_into_inputs
from ...graph.actions import Action, Kept
from ...policy.classes import Trait, has
from ...policy.weights import IN_RANGE, NUMPY_HALVES, Entry, measure
from .dtypes import Dtypes, Typing, numbers, readers
from .folding import fold_constants
from .plan import PrecisionPlan, foldable, op_name


@dataclass(frozen=True, slots=True)
class Ledger:
    """``doubts``: node → the reason why a rule would keep it, had no search been asked for."""

    entries: tuple[Entry, ...]
    doubts: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> list[dict[str, Any]]:
        return [entry.to_json() for entry in self.entries]


def weigh(
    module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor], searched: bool = False
) -> tuple[Ledger, PrecisionPlan]:
    """The ledger of all weights and numbers that are read in half, and the plan with the readers of unfit ones in FP32.

    ``module`` is the prepared original and is not changed; ``example`` has one tensor per input. A value that depends
    on weights alone and is computed at conversion (a transposed weight) has its node's name. ``searched``: a search
    decides about the readers of those that half would not make infinite (`Ledger.doubts`).
    """
    graph = fold_constants(duplicate(module), lambda node: foldable(plan, node))
    dtypes, nodes = Typing(graph, example).under(plan), dict(walk(graph))
    entries: dict[str, Entry] = {}
    kept: dict[str, Kept] = {}
    doubts: dict[str, str] = {}
    wide: dict[str, Action] = {}
    guards = {str(node.target) for node in module.graph.nodes if IN_RANGE in node.meta}
    for name, entry in _read_in_half(module, graph, dtypes, plan.precision.dtype):
        entries[entry.weight] = entry
        if not entry.over_budget or name not in plan.actions or writes_into_inputs(nodes[name].target):
            continue
        if not entry.keeps_its_readers(searched) or entry.weight in guards:
            doubts[name] = entry.reason
        elif plan.actions[name] is Action.INPUT and plan.precision.level == "O1":
            wide[name] = Action.FP32
        else:
            kept[name] = Kept(name, op_name(nodes[name]), entry.reason, entry.evidence)
    plan = replace(plan, actions={**plan.actions, **wide})
    return Ledger(tuple(entries.values()), doubts), plan.keeping(list(kept.values()))


def _read_in_half(
    module: GraphModule, graph: GraphModule, dtypes: Dtypes, half: str
) -> Iterator[tuple[str, Entry]]:
    """Each node that reads a constant in half, with the constant's entry. ``graph``: the module, folded."""
    for node in graph.graph.nodes:
        weight = attrgetter(str(node.target))(graph) if node.op == "get_attr" else None
        if isinstance(weight, Tensor) and weight.dtype == torch.float32:
            promoted = weight.ndim == 0  # read in the dtype of the other operands
            read = [
                name
                for name, dtype in readers(node, "", dtypes)
                if dtype == dtypes.half or (promoted and dtypes.is_half(name))
            ]
            entry = measure(_origin(module, str(node.target)), to_numpy(weight), half) if read else None
            yield from ((name, entry) for name in read if entry is not None)
    for node, entry in _taken(module, graph, half).items():
        yield from ((name, entry) for name, dtype in readers(node, "", dtypes) if dtype == dtypes.half)
    for name, node in walk(graph):
        if dtypes.touches_half(name):
            for number in numbers(node):
                entry = measure(f"{number:g} ({name})", number, half)
                if entry.over_budget:  # the report lists only numbers that half cannot hold
                    yield name, entry


def _taken(module: GraphModule, graph: GraphModule, half: str) -> dict[Node, Entry]:
    """The values that are taken out of a table of which half cannot hold every number (`Entry.is_wide`)."""
    found, largest = dict[Node, Entry](), float(finfo(NUMPY_HALVES[half]).max)
    for node in graph.graph.nodes:
        read, name = node.all_input_nodes, op_name(node) if isinstance(node.target, OpOverload) else ""
        weight = attrgetter(str(read[0].target))(graph) if read and read[0].op == "get_attr" else None
        if isinstance(weight, Tensor) and weight.dtype == torch.float32 and has(name, Trait.COPIES):
            is_larger = weight.numel() > 0 and float(weight.abs().max()) > largest
            tables = (
                [measure(_origin(module, str(read[0].target)), to_numpy(weight), half)] if is_larger else []
            )
        else:
            tables = [found[one] for one in read if one in found and has(name, Trait.MOVES)]
        if tables and tables[0].is_wide:
            found[node] = tables[0]
    return found


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
