"""Ahead-of-time autocast: a whole program and its plan become a half program.

The plan is carried out by *interpreting* the whole program node by node (casting inputs as the plan says,
exactly as the autocast dispatch key would) and exporting that interpretation. So the half program cannot
differ from what runs: the same few lines are the eager semantics and the rewrite. Casts of weights are
folded into the weights, and no tensor is cast twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from ..models.program import runnable
from ..models.spec import ModelSpec
from .folding import fold_casts, fold_constants, half_copy
from .plan import Action, PrecisionPlan
from .trace import export_as_run

CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


@dataclass(frozen=True, slots=True)
class HalfProgram:
    """The rewritten program with its counts; bytes are those of parameters and constants."""

    program: ExportedProgram
    plan: PrecisionPlan
    nodes: int
    half_nodes: int
    casts: int
    bytes: int
    bytes_fp32: int


def rewrite(
    whole: ExportedProgram, plan: PrecisionPlan, spec: ModelSpec, example: Sequence[Tensor]
) -> HalfProgram:
    """Rewrite ``whole`` under ``plan``; outputs keep the spec's datatypes.

    ``example``: one tensor per input, with a batch of at least 2 where the batch is free. Raises
    ExportFailed where the program cannot be exported under its new dtypes.
    """
    graph = fold_constants(runnable(whole), lambda node: _folds(plan, node))
    folded = fold_casts(graph, _weight_uses(graph, plan, example), plan.dtype)

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        autocast = Autocast(folded, plan)
        answers = zip(autocast.run(*tensors), spec.outputs, strict=True)
        return tuple(autocast.cast(answer, tensor.type.torch) for answer, tensor in answers)

    program = export_as_run(folded, run, spec, example)
    nodes, half_nodes, casts = _count(program, plan.dtype)
    return HalfProgram(program, plan, nodes, half_nodes, casts, stored_bytes(program), stored_bytes(whole))


class Autocast(Interpreter):
    """Runs a graph with every node's floating inputs in the dtype that the plan gives them.

    Run eagerly on the whole program under the CPU lists it is bit-equal to ``torch.autocast("cpu")``, before
    the outputs are cast back.
    """

    def __init__(self, module: GraphModule, plan: PrecisionPlan) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._plan = plan
        self._done: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._weights: dict[int, str] = {}

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        self._weights[id(value)] = target
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        action = self._plan.actions.get(self._node.name, Action.INPUT)
        args, kwargs = self.prepared(action, target, args, kwargs)
        result = super().call_function(target, args, kwargs)
        if isinstance(target, OpOverload) and target._schema.is_mutable:
            self._done.clear()  # a cast made before the change is stale
        if action is Action.FP32_BACK:
            return _each_tensor(result, lambda tensor: self.cast(tensor, self._plan.dtype))
        return result

    def prepared(self, action: Action, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The node's arguments in the dtypes of its action."""
        if action is Action.INPUT:
            return args, kwargs
        if action is Action.FP32_DTYPE:
            return _with_dtype(target, args, kwargs)
        if action is Action.HALF:
            dtype = self._plan.dtype
        elif action is Action.WIDEST:
            dtype = _widest((args, kwargs), self._plan.dtype)
        else:
            dtype = torch.float32
        return _each_tensor((args, kwargs), lambda tensor: self.cast(tensor, dtype))

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor`` in ``dtype``, cast at most once; integers, complex and float64 stay (as in autocast)."""
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        key = (id(tensor), dtype)
        if key not in self._done:
            self._done[key] = (
                self._new_cast(tensor, dtype),
                tensor,
            )  # keeps `tensor` alive: its id is the key
        return self._done[key][0]

    def _new_cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self._weights.get(id(tensor))
        if weight is not None and dtype == self._plan.dtype:
            rounded = half_copy(self.module, weight)
            if rounded is not None:
                return rounded
        return tensor.to(dtype)


class _Uses(Autocast):
    """Learns in which dtypes each weight is read."""

    def __init__(self, module: GraphModule, plan: PrecisionPlan) -> None:
        super().__init__(module, plan)
        self.uses: dict[str, set[torch.dtype]] = {}

    def prepared(self, action: Action, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        prepared = super().prepared(action, target, args, kwargs)
        for before, after in zip(_tensors((args, kwargs)), _tensors(prepared), strict=True):
            if weight := self._weights.get(id(before)):
                self.uses.setdefault(weight, set()).add(after.dtype)
        return prepared

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        for tensor in _tensors(args):
            if weight := self._weights.get(id(tensor)):
                self.uses.setdefault(weight, set()).add(tensor.dtype)
        return super().output(target, args, kwargs)


def stored_bytes(program: ExportedProgram) -> int:
    """Bytes of parameters, buffers and constants; a tensor that several names share counts once."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    storages = {
        t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)
    }
    return sum(storages.values())


def _folds(plan: PrecisionPlan, node: Node) -> bool:
    """Whether an op on weights alone may be done before the cast: not one that autocast does in half."""
    return plan.precision.level != "O1" or plan.actions.get(node.name) is not Action.HALF


def _weight_uses(
    module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor]
) -> dict[str, set[torch.dtype]]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        interpreter = _Uses(module, plan)
        interpreter.run(*[mode.from_tensor(tensor) for tensor in example])
    return interpreter.uses


def _count(program: ExportedProgram, half: torch.dtype) -> tuple[int, int, int]:
    """Floating-point nodes, those of them that give half, and casts between floating types."""
    nodes = halves = casts = 0
    for node in program.graph.nodes:
        dtypes = _float_dtypes(node.meta.get("val"))
        if not isinstance(node.target, OpOverload) or not dtypes:
            continue
        source = _float_dtypes(node.args[0].meta.get("val")) if node.target in CASTS and node.args else ()
        if source and source != dtypes:
            casts += 1
        else:
            nodes += 1
            halves += half in dtypes
    return nodes, halves, casts


def _float_dtypes(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in _tensors(value) if tensor.is_floating_point()}


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each_tensor(values, lambda tensor: found.append(tensor) or tensor)
    return found


def _each_tensor(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return map_aggregate(values, lambda value: change(value) if isinstance(value, Tensor) else value)


def _widest(values: Any, half: torch.dtype) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in _tensors(values) if tensor.is_floating_point()}
    return half if dtypes <= {half, torch.float64} else torch.float32


def _with_dtype(target: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """``dtype=float32`` where the first argument is a floating tensor and no dtype was asked for."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.dtype == torch.float64:
        return args, kwargs
    schema = [argument.name for argument in target._schema.arguments]
    given = args[schema.index("dtype")] if schema.index("dtype") < len(args) else kwargs.get("dtype")
    if given is not None:
        return args, kwargs
    return args[: schema.index("dtype")], {**kwargs, "dtype": torch.float32}
