"""The precision plan: for every node of the whole program what it computes in, and why.

The plan is the versioned artefact (``precision.json``); `autocast.py` carries it out.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..models.errors import BadSetting
from ..models.package import Precision
from .policy import EMBEDDINGS, LISTS, NORMALISATION, RECURRENT, OpLists, Rule


class Action(Enum):
    """What happens to a node's floating inputs (float64 never takes part, as in autocast)."""

    HALF = "half"
    FP32 = "fp32"
    FP32_DTYPE = "fp32 by dtype argument"
    FP32_BACK = "fp32, result back to half"
    WIDEST = "widest input"
    INPUT = "as its inputs"


_BY_RULE = {
    Rule.LOWER: Action.HALF,
    Rule.FP32: Action.FP32,
    Rule.FP32_DTYPE: Action.FP32_DTYPE,
    Rule.WIDEST: Action.WIDEST,
    Rule.BANNED: Action.FP32,  # live autocast raises; in FP32 it is harmless
    Rule.INPUT: Action.INPUT,
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A node that the policy would run in half and the plan keeps in FP32."""

    node: str
    op: str
    reason: str
    evidence: str = ""

    def to_json(self) -> dict[str, str]:
        return {"node": self.node, "op": self.op, "reason": self.reason, "evidence": self.evidence}


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """``actions``: node name → Action, for every op of the whole program."""

    precision: Precision
    lists: str
    actions: Mapping[str, Action]
    kept: tuple[Kept, ...]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision.dtype == "bf16" else torch.float16

    @property
    def fp32_by_policy(self) -> int:
        """Nodes that are FP32 by list or level (kept nodes are not among them)."""
        kept = {kept.node for kept in self.kept}
        fp32 = (Action.FP32, Action.FP32_DTYPE, Action.FP32_BACK)
        return sum(action in fp32 and name not in kept for name, action in self.actions.items())

    def to_json(self, graph: Graph) -> dict[str, Any]:
        return {
            "level": self.precision.level,
            "dtype": self.precision.dtype,
            "embeddings": self.precision.embeddings,
            "keep": list(self.precision.keep),
            "lists": f"torch.autocast, {self.lists}",
            "nodes": [
                {
                    "node": node.name,
                    "op": op_name(node),
                    "module": module_path(node),
                    "action": self.actions[node.name].value,
                }
                for node in graph.nodes
                if node.name in self.actions
            ],
            "kept": [kept.to_json() for kept in self.kept],
        }


def make_plan(graph: Graph, precision: Precision, lists: str = "cuda") -> PrecisionPlan:
    """Plan a whole program (`models.program.runnable`'s graph) under a level and its keep patterns.

    A keep pattern is ``op:NAME``, a node's name, or a module's path (both with ``*``). Raises BadSetting
    for a pattern that matches no node: a misspelt pattern must not look like a kept node.
    """
    nodes = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    actions = {node.name: _action(node, precision, LISTS[lists]) for node in nodes}
    kept = []
    if precision.level in ("O2", "O3"):  # at O1 they are FP32 by policy
        loops = [node for node in nodes if op_name(node) in RECURRENT]
        kept += [Kept(node.name, op_name(node), "no half kernel on every device") for node in loops]
    for node, pattern in _matches(nodes, precision.keep):
        may_be_half = actions[node.name] in (Action.HALF, Action.INPUT, Action.WIDEST)
        if may_be_half and precision.level != "O0" and not _is_mutable(node):
            kept.append(Kept(node.name, op_name(node), f"asked for by keep = {pattern!r}"))
            actions[node.name] = Action.FP32
    return PrecisionPlan(precision, lists, actions, tuple(kept))


def op_name(node: Node) -> str:
    assert isinstance(node.target, OpOverload)
    return node.target._schema.name.removeprefix("aten::")


def module_path(node: Node) -> str:
    """The path of the ``nn.Module`` whose forward made this node, as ``named_modules`` says it."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values()))), "")


def _action(node: Node, precision: Precision, lists: OpLists) -> Action:
    name, target = op_name(node), node.target
    assert isinstance(target, OpOverload)
    if precision.level == "O0":
        return Action.INPUT
    if name in RECURRENT:
        return Action.FP32
    if precision.level == "O1":
        if name in EMBEDDINGS and precision.embeddings == "half":
            return Action.HALF
        return _BY_RULE[lists.rule(target)]
    if _is_mutable(node):
        return Action.INPUT
    if precision.level == "O2" and name in NORMALISATION:
        return Action.FP32_BACK
    return Action.HALF


def _is_mutable(node: Node) -> bool:
    """Whether an op changes its input: a cast would be a copy, and the change would be lost."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _matches(nodes: Sequence[Node], patterns: Sequence[str]) -> list[tuple[Node, str]]:
    found: dict[Node, str] = {}
    for pattern in patterns:
        hits = [node for node in nodes if _matches_one(node, pattern)]
        if not hits:
            paths = sorted({module_path(node) for node in nodes} - {""})
            raise BadSetting(
                f"keep = {pattern!r} matches no node: expected op:NAME (one of "
                f"{sorted({op_name(node) for node in nodes})}), a node's name ({nodes[0].name if nodes else '-'}, "
                f"…) or a module's path (one of {paths[:20]})"
            )
        for node in hits:
            found.setdefault(node, pattern)
    return sorted(found.items(), key=lambda item: nodes.index(item[0]))


def _matches_one(node: Node, pattern: str) -> bool:
    if pattern.startswith("op:"):
        return fnmatch.fnmatchcase(op_name(node), pattern[3:])
    path = module_path(node)
    return bool(pattern) and (
        fnmatch.fnmatchcase(node.name, pattern)
        or fnmatch.fnmatchcase(path, pattern)
        or path.startswith(f"{pattern}.")
    )
