"""Casts where they move the fewest bytes: type-transparent nodes go to the cheaper side of a minimum cut.

Every node that computes keeps the precision that its plan gives it; a view, a concatenation or a ReLU between two such
nodes may run in either (`is_transparent`). No result changes: a value that reaches an FP32 reader unrounded stays
unrounded, a value that is rounded stays rounded, and every node that computes reads the same dtypes with the same
strides, so that the same kernels run.
"""

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ....models.program import writes_into_inputs
from ...graph.actions import Action
from ...graph.mincut import Flow
from ...policy.classes import Trait, has
from .aliases import aliased, sharing_written_memory
from .dtypes import Dtypes, Typer, Typing, cast_to, read_as, sizes_unknown, tensors_of
from .plan import PrecisionPlan

_BY_SIDE = {True: Action.HALF, False: Action.FP32}
_FOLLOWS = (Action.INPUT, Action.WIDEST)
_STEERED = (Action.HALF, Action.FP32, Action.FP32_BACK)
_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)
Layouts = dict[str, list[tuple[torch.dtype, tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class Placed:
    """The plan with explicit actions where casts moved, and the bytes that casts read and write per run.

    ``moved``: the nodes that run on the other side now. Bytes are those at the example's sizes; casts of weights do not
    count, for they are done at conversion.
    """

    plan: PrecisionPlan
    bytes_before: int
    bytes_after: int
    moved: tuple[str, ...]


def place(
    module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor], outputs: Sequence[torch.dtype]
) -> Placed:
    """Move the type-transparent nodes of ``module`` (prepared, FP32) to where the fewest bytes are cast.

    ``example``: one tensor per input; its sizes are those that count. ``outputs``: the dtypes in which the
    answers are given. Bodies of control flow stay as they are.
    """
    flow = read_flow(module, plan, Typing(module, example).under(plan), outputs)
    wanted, free, before = _layouts(module, plan, example), flow.movable(), flow.cast_bytes(flow.sides)
    while free:
        sides = flow.cut(free)
        moved = [name for name in free if sides[name] != flow.sides[name]]
        actions = _actions(flow, plan, sides)
        followers = frozenset(name for name in actions if plan.actions[name] in _FOLLOWS)
        placed = replace(plan, actions={**plan.actions, **actions}, placed=followers)
        culprits = _culprits(flow, moved, wanted, _layouts(module, placed, example)) if moved else set()
        if moved and not culprits:
            return Placed(placed, before, flow.cast_bytes(sides), tuple(moved))
        free = [name for name in free if name not in culprits] if moved else []
    return Placed(plan, before, before, ())


def _actions(flow: Flow, plan: PrecisionPlan, sides: Mapping[str, bool]) -> dict[str, Action]:
    """Explicit actions for nodes that moved, and for those that would follow a source that moved."""
    changed = {name for name, side in sides.items() if side != flow.sides[name]}
    return {
        name: _BY_SIDE[flow.reads[name] if name in flow.reads else sides[name]]
        for name, sources in flow.sources.items()
        if name in plan.actions
        and (name in changed or (plan.actions[name] in _FOLLOWS and not changed.isdisjoint(sources)))
    }


def read_flow(
    module: GraphModule, plan: PrecisionPlan, dtypes: Dtypes, outputs: Sequence[torch.dtype]
) -> Flow:
    """The flow of a graph under a plan. The sources of an op that cannot be given a dtype are not free."""
    return _Reading(module, plan, dtypes).flow(outputs)


class _Reading:
    """Reads a graph once; all names are of nodes in the outer graph."""

    def __init__(self, module: GraphModule, plan: PrecisionPlan, dtypes: Dtypes) -> None:
        self._nodes: dict[str, Node] = {node.name: node for node in module.graph.nodes}
        self._plan, self._dtypes, self._pair = plan, dtypes, (dtypes.half, torch.float32)
        self._constants = _constants(self._nodes)
        self._written = {node.name for node in sharing_written_memory(self._nodes.values())}
        self._signs = distinguishes_signs_of_zero(module.graph)

    def flow(self, outputs: Sequence[torch.dtype]) -> Flow:
        flow = Flow()
        readers = {
            name: node for name, node in self._nodes.items() if self._reads(name) and _sees_values(node)
        }
        steered = {name for name in readers if self._is_steered(name)}
        fixed = {self._root(s) for name in readers if name not in steered for s in self._reads(name)}
        for name, node in self._nodes.items():
            self._add_value(flow, name)
            if name in steered:
                flow.sources[name] = list(self._reads(name))
                if name not in fixed and self._is_free(name):
                    flow.transparent[name] = 0 if aliased(node, written=False) else self._dtypes.numel[name]
                else:
                    flow.reads[name] = self._dtypes.half in self._reads(name).values()
            elif self._root(name) in flow.transparent:
                flow.tied[name] = self._root(name)
        answers = next(node for node in self._nodes.values() if node.op == "output").args[0]
        for answer, dtype in zip(answers, outputs, strict=True):  # type: ignore[arg-type]
            if isinstance(answer, Node) and answer.name in flow.sides and dtype in self._pair:
                reader = f"output {len(flow.sources)}"
                flow.sources[reader], flow.reads[reader] = [answer.name], dtype == self._dtypes.half
        return flow

    def _add_value(self, flow: Flow, name: str) -> None:
        given = self._given(name)
        if len(given) != 1 or not given < set(self._pair):
            return
        flow.sides[name] = given == {self._dtypes.half}
        widened = self._nodes[name].target in _CASTS and self._dtypes.half in self._reads(name).values()
        # The way back of a cast is known, and weights are cast ahead.
        free = widened or name in self._constants
        flow.numel[name] = 0 if free else self._dtypes.numel[name]
        if widened:
            flow.rounded.add(name)

    def _reads(self, name: str) -> dict[str, torch.dtype]:
        """Source → half or FP32, as the node reads it; other dtypes never take part."""
        if self._nodes[name].op == "output":
            return {}
        return {source: d for source, d in self._dtypes.reads.get(name, {}).items() if d in self._pair}

    def _given(self, name: str) -> set[torch.dtype]:
        return {dtype for dtype in self._dtypes.out.get(name, ()) if dtype.is_floating_point}

    def _root(self, name: str) -> str:
        node = self._nodes[name]
        return node.args[0].name if node.target is operator.getitem else name  # type: ignore[union-attr]

    def _is_steered(self, name: str) -> bool:
        """True if an explicit action can say, or says, in what dtype the node reads all of its inputs."""
        action, target = self._plan.actions.get(name), self._nodes[name].target
        if action in _STEERED:
            return True
        return (
            action in _FOLLOWS
            and len(set(self._reads(name).values())) == 1
            and not writes_into_inputs(target)
            and name not in self._written
        )

    def _is_free(self, name: str) -> bool:
        plan = self._plan
        asked = name in plan.islands or any(kept.node == name for kept in plan.kept)
        untouchable = asked or name in self._constants or name in self._written
        return (
            not untouchable
            and plan.actions[name] is not Action.FP32_BACK
            and self._given(name) == set(self._reads(name).values())
            and is_transparent(self._nodes[name], self._dtypes.half, self._signs)
        )


def _sees_values(node: Node) -> bool:
    """True if the result of a node depends on the numbers in its inputs, and not only on their shapes."""
    return not (isinstance(node.target, OpOverload) and node.target._schema.name.startswith("aten::sym_"))


def _constants(nodes: Mapping[str, Node]) -> set[str]:
    """Weights and values made of weights alone: they are cast at conversion, at no cost."""
    found: set[str] = set()
    for name, node in nodes.items():
        parents = node.all_input_nodes
        if node.op == "get_attr" or (parents and all(parent.name in found for parent in parents)):
            found.add(name)
    return found


class _Layouts(Typer):
    """A `Typer` that also writes down the dtype and the strides in which each node reads its tensors."""

    def __init__(self, module: GraphModule, plan: PrecisionPlan) -> None:
        super().__init__(module, plan, {}, Dtypes(plan.dtype), "")
        self.seen: Layouts = {}

    def _step(self, node: Node, action: Action, args: Any, kwargs: Any) -> Any:
        floats = [tensor.dtype for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
        dtype = read_as(action, floats, self._plan.dtype)
        self._see(node, map_aggregate((args, kwargs), lambda value: cast_to(value, dtype)))
        return super()._step(node, action, args, kwargs)

    def _control_flow(self, node: Node) -> Any:
        self._see(node, self.fetch_args_kwargs_from_env(node))
        return super()._control_flow(node)

    def _see(self, node: Node, values: Any) -> None:
        self.seen[node.name] = [(tensor.dtype, tensor.stride()) for tensor in tensors_of(values)]


def _layouts(module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor]) -> Layouts | None:
    """Node → dtype and strides of its inputs; None where some op refuses the strides that it would get."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    layouts = _Layouts(module, plan)
    with mode, sizes_unknown(module), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layouts.run(*[mode.from_tensor(tensor, static_shapes=True) for tensor in example])
        except RuntimeError:
            return None
    return layouts.seen


def _culprits(flow: Flow, moved: Sequence[str], wanted: Layouts | None, found: Layouts | None) -> set[str]:
    """Moved nodes that must not move: those that the first node with another input layout depends on."""
    if wanted is None or found is None:
        return set(moved)
    first = next((n for n, seen in found.items() if n not in flow.transparent and seen != wanted[n]), None)
    if first is None:
        return set()
    behind, stack = set[str](), [flow.root(source) for source in flow.sources.get(first, moved)]
    while stack:
        if (name := stack.pop()) in flow.transparent and name not in behind:
            behind.add(name)
            stack.extend(flow.root(source) for source in flow.sources[name])
    return behind & set(moved) or set(moved)


def is_transparent(node: Node, half: torch.dtype, signs_of_zero_matter: bool) -> bool:
    """True if a node gives the same numbers in FP32 as in ``half``: ``round(op(x)) == op(round(x))``.

    Movements only place values elsewhere: equal bit for bit. Selections pick a value, or a bound that half represents,
    by an order that rounding keeps: equal but for the sign of a zero (a negative value that underflows is −0 if it is
    rounded first and may be +0 if not). So selections may not where signs of zero matter.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    name = target._schema.name.removeprefix("aten::")
    listed = has(name, Trait.MOVES) or (has(name, Trait.SELECTS) and not signs_of_zero_matter)
    return listed and _scalars_are_exact(node, target, half)


def distinguishes_signs_of_zero(graph: Graph) -> bool:
    """True if some op gives different answers for −0 and +0 (beyond the sign of a zero)."""
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
    """True if half represents each number that may come out: fill values, bounds."""
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
