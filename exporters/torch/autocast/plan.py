"""The precision plan of a captured program: for every node of the original, the precision it computes in, and why.

The plan is the versioned artefact (``precision.json``); `rewrite.py` carries it out.
"""

import fnmatch
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ....models.errors import BadSetting
from ....models.folder.package import Precision
from ....models.program import source_place, walk, writes_into_inputs
from ...graph.actions import Action, Kept
from ...policy.classes import NO_HALF_KERNEL, Rule, Trait, class_of, has
from ...policy.weights import IN_RANGE
from .aliases import uncastable
from .policy import LISTS, OpLists

_BY_RULE = {
    Rule.LOWER: Action.HALF,
    Rule.FP32: Action.FP32,
    Rule.FP32_DTYPE: Action.FP32_DTYPE,
    Rule.FP32_BACK: Action.FP32_BACK,
    Rule.WIDEST: Action.WIDEST,
    Rule.BANNED: Action.FP32,  # live autocast raises; in FP32 it is harmless
    Rule.INPUT: Action.INPUT,
}


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """``actions``: qualified node name (`models.program.walk`) → Action, for every op of the original program.

    ``islands``: nodes that the user's own code has in FP32 → where it says so. ``placed``: nodes that follow
    their inputs by policy and were given a precision only to move a cast (`placement.py`).
    """

    precision: Precision
    lists: str
    actions: Mapping[str, Action]
    kept: tuple[Kept, ...]
    islands: Mapping[str, str] = field(default_factory=dict)
    placed: frozenset[str] = frozenset()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision.dtype == "bf16" else torch.float16

    @property
    def fp32_by_policy(self) -> int:
        """Nodes that are FP32 by list, level or the user's own code (kept nodes are not among them)."""
        others = {kept.node for kept in self.kept} | self.placed
        fp32 = (Action.FP32, Action.FP32_DTYPE, Action.FP32_BACK)
        return sum(action in fp32 and name not in others for name, action in self.actions.items())

    def keeping(self, kept: Sequence[Kept]) -> "PrecisionPlan":
        """The plan with more nodes in FP32."""
        actions = {**self.actions, **dict.fromkeys((one.node for one in kept), Action.FP32)}
        return replace(self, actions=actions, kept=(*self.kept, *kept))

    def with_sources(self, module: GraphModule) -> "PrecisionPlan":
        """The plan whose kept nodes name the lines of code from which ``module`` was traced."""
        sources = {name: source_place(node) for name, node in walk(module)}
        return replace(self, kept=tuple(replace(one, source=sources.get(one.node, "")) for one in self.kept))

    def to_json(self, module: GraphModule) -> dict[str, Any]:
        return {
            **self.precision.to_json(),
            "lists": f"torch.autocast, {self.lists}",
            "accumulation": "FP32",  # of matrix products: no reduction in half (`use_true_fp32`)
            "nodes": [self._node_to_json(name, node) for name, node in walk(module) if name in self.actions],
            "kept": [kept.to_json() for kept in self.kept],
        }

    def _node_to_json(self, name: str, node: Node) -> dict[str, str]:
        row = {
            "node": name,
            "op": op_name(node),
            "module": module_path(node),
            "action": self.actions[name].value,
        }
        return row | ({"reason": self.islands[name]} if name in self.islands else {})


def make_plan(
    module: GraphModule, precision: Precision, lists: str = "cuda", half_loops: bool = False
) -> PrecisionPlan:
    """Plan an original program (`models.program.runnable`, prepared) under a level and its keep patterns.

    ``half_loops``: recurrent layers are half where the level allows it, as live autocast has them on CUDA.

    A keep pattern is ``op:NAME``, a node's name, or a module's path (both with ``*``). Raises BadSetting
    for a pattern that matches no node: a misspelt pattern must not look like a kept node.
    """
    nodes = {name: node for name, node in walk(module) if isinstance(node.target, OpOverload)}
    alone, as_given = _of_constants_alone(module, precision), uncastable(module)
    actions = {
        name: Action.INPUT
        if name in alone or (name in as_given and not writes_into_inputs(node.target))
        else _action(node, precision, LISTS[lists], half_loops)
        for name, node in nodes.items()
    }
    islands: dict[str, str] = {}
    if precision.level != "O0":
        islands = {name: _island(node) for name, node in nodes.items() if _island(node)}
    actions |= {name: Action.FP32 for name in islands if name not in as_given}
    kept = _kept(nodes, actions, as_given, precision, half_loops)
    return PrecisionPlan(precision, lists, actions, tuple(kept), islands)


def _kept(
    nodes: Mapping[str, Node],
    actions: dict[str, Action],
    as_given: Collection[str],
    precision: Precision,
    half_loops: bool,
) -> list[Kept]:
    """The nodes that the level or the operator keeps in FP32; their ``actions`` are set to it. ``as_given``: nodes that
    may not cast their inputs."""
    kept = []
    if precision.level in ("O2", "O3") and not half_loops:  # at O1 they are FP32 by policy
        loops = [(name, node) for name, node in nodes.items() if has(op_name(node), Trait.RECURRENT)]
        kept += [Kept(name, op_name(node), NO_HALF_KERNEL) for name, node in loops]
    for name, pattern in _matches(nodes, precision.keep):
        may_be_half = actions[name] in (Action.HALF, Action.INPUT, Action.WIDEST)
        if may_be_half and precision.level != "O0" and name not in as_given:
            kept.append(Kept(name, op_name(nodes[name]), f"asked for by keep = {pattern!r}"))
            actions[name] = Action.FP32
    return kept


def op_name(node: Node) -> str:
    assert isinstance(node.target, OpOverload)
    return node.target._schema.name.removeprefix("aten::")


def module_path(node: Node) -> str:
    """The path of the ``nn.Module`` whose forward made this node, as ``named_modules`` says it."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values()))), "")


def _island(node: Node) -> str:
    """The place where the user's own code has this node in FP32 (noted by `models.capture`); empty where it does
    not."""
    return str((node.meta.get("custom") or {}).get("halfeven_island", ""))


def foldable(plan: PrecisionPlan, node: Node) -> bool:
    """True if an op on weights alone may be done before the cast: not one that autocast does in half."""
    return plan.precision.level != "O1" or plan.actions.get(node.name) is not Action.HALF


def _action(node: Node, precision: Precision, lists: OpLists, half_loops: bool) -> Action:
    name, target = op_name(node), node.target
    assert isinstance(target, OpOverload)
    if half_loops and has(name, Trait.RECURRENT) and precision.level != "O0":
        return Action.HALF
    if precision.level == "O1" and not has(name, Trait.RECURRENT, Trait.EMBEDDING):
        return _BY_RULE[lists.rule(target)]
    if precision.level in ("O2", "O3") and writes_into_inputs(node.target):
        return Action.INPUT
    return _BY_RULE[class_of(name).rule(precision)]


def _of_constants_alone(module: GraphModule, precision: Precision) -> set[str]:
    """The nodes of the main graph that are computed from weights, numbers and integers alone and are no products.

    Where all is half (O2, O3) they stay in FP32, and their readers cast them.
    """
    alone: set[Node] = set()
    for node in module.graph.nodes if precision.level in ("O2", "O3") else ():
        value = node.meta.get("val")
        if node.op == "placeholder":
            given = not isinstance(value, Tensor) or value.is_floating_point()
        elif isinstance(node.target, OpOverload):
            found = class_of(op_name(node))
            given = (
                found.o1 is Rule.LOWER or Trait.EMBEDDING in found.traits or writes_into_inputs(node.target)
            )
        else:
            given = node.op == "call_function" and node.target is not operator.getitem
        # A constant brought into half's range is read in half: computed in FP32 first, its result would round to 0.
        guards = any(IN_RANGE in source.meta for source in node.all_input_nodes)
        if not given and not guards and alone.issuperset(node.all_input_nodes):
            alone.add(node)
    return {node.name for node in alone}


def _matches(nodes: Mapping[str, Node], patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Names of nodes, in the program's order, each with the first pattern that matches it."""
    found: dict[str, str] = {}
    for pattern in patterns:
        hits = [name for name, node in nodes.items() if _matches_one(name, node, pattern)]
        if not hits:
            paths = sorted({module_path(node) for node in nodes.values()} - {""})
            raise BadSetting(
                f"keep = {pattern!r} matches no node: expected op:NAME (one of "
                f"{sorted({op_name(node) for node in nodes.values()})}), a node's name ({next(iter(nodes), '-')}, "
                f"…) or a module's path (one of {paths[:20]})"
            )
        for name in hits:
            found.setdefault(name, pattern)
    return [(name, found[name]) for name in nodes if name in found]


def _matches_one(name: str, node: Node, pattern: str) -> bool:
    if pattern.startswith("op:"):
        return fnmatch.fnmatchcase(op_name(node), pattern[3:])
    path = module_path(node)
    return bool(pattern) and (
        fnmatch.fnmatchcase(name, pattern)
        or fnmatch.fnmatchcase(path, pattern)
        or path.startswith(f"{pattern}.")
        or name.startswith(f"{pattern}.")
    )
