"""Ahead-of-time autocast: an original program and its plan become a half program.

The plan is carried out by *interpreting* the original program node by node (casting inputs as the plan says,
exactly as the autocast dispatch key would) and exporting that interpretation. So the half program cannot
differ from what runs: the same few lines are the eager semantics and the rewrite. Casts of weights are
folded into the weights, and no tensor is cast twice.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from ....models.errors import ExportFailed
from ....models.program import duplicate, runnable, walk, writes_into_inputs
from ....models.spec.spec import ModelSpec
from ...graph.actions import Action
from ...graph.traffic import Half
from .bodies import prefixes
from .dtypes import (
    CapturedOperand,
    Dtypes,
    Typing,
    captured,
    captured_at,
    is_control_flow,
    read_as,
    read_in,
    state_at,
    tensors_of,
    unpacked,
    with_dtype,
)
from .folding import fold_casts, fold_constants, half_copy
from .plan import PrecisionPlan, foldable

CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


@dataclass(frozen=True, slots=True)
class HalfProgram(Half):
    """The rewritten program with its counts; bytes are those of parameters and constants."""

    program: ExportedProgram
    plan: PrecisionPlan


def rewrite(
    original: ExportedProgram,
    plan: PrecisionPlan,
    spec: ModelSpec,
    example: Sequence[Tensor],
    module: GraphModule | None = None,
) -> HalfProgram:
    """Rewrite ``original`` under ``plan``; outputs keep the spec's datatypes.

    ``example``: one tensor per input, with a batch of at least 2 where the batch is free. ``module``: the
    original as it was prepared for the plan; it is left as it is. Raises ExportFailed where the program cannot
    be exported under its new dtypes.
    """
    graph = duplicate(module) if module is not None else runnable(original)
    plan = plan.with_sources(graph)
    fold_constants(graph, lambda node: foldable(plan, node))
    dtypes = Typing(graph, example).under(plan)
    fold_casts(graph, weight_reads(graph, dtypes), plan.dtype)

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        autocast = Autocast(graph, plan, dtypes)
        answers = zip(autocast.run(*tensors), spec.outputs, strict=True)
        return tuple(autocast.cast(answer, tensor.type.torch) for answer, tensor in answers)

    program = export_as_run(graph, run, spec, example)
    nodes, half_nodes, casts = _count(program, plan.dtype)
    sizes = stored_bytes(program), stored_bytes(original)
    return HalfProgram(nodes, half_nodes, plan.fp32_by_policy, plan.kept, casts, *sizes, program, plan)


def weight_reads(module: GraphModule, dtypes: Dtypes) -> dict[str, set[torch.dtype]]:
    """Weight → the dtypes in which it is read, by control-flow bodies too."""
    found: dict[str, set[torch.dtype]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(attrgetter(str(node.target))(module), Tensor):
            found.setdefault(str(node.target), set()).update(read_in(node, "", dtypes))
    return found


class Autocast(Interpreter):
    """Runs a graph with every node's floating inputs in the dtype that the plan gives them.

    Run eagerly on the original program under the CPU lists it is bit-equal to ``torch.autocast("cpu")``, before
    the outputs are cast back. ``dtypes`` (`dtypes.Typing`) are needed where the program has control flow, and
    are inferred from the first inputs where they are not given.
    """

    def __init__(
        self, module: GraphModule, plan: PrecisionPlan, dtypes: Dtypes | None = None, prefix: str = ""
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._plan, self._dtypes, self._prefix = plan, dtypes, prefix
        self._done: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._weights: dict[int, str] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.module, GraphModule)
        if self._dtypes is None and any(is_control_flow(node) for node in self.module.graph.nodes):
            self._dtypes = Typing(self.module, args).under(self._plan)
        return super().run(*args, **kwargs)

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, Tensor):
            self._weights[id(value)] = target
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_control_flow(self._node):
            return self._control_flow(self._node, target, args)
        if target is torch.ops.aten._assert_tensor_metadata.default:  # it pins the dtypes of the original
            return None
        action = self._plan.actions.get(self._prefix + self._node.name, Action.INPUT)
        args, kwargs = self.prepared(action, target, args, kwargs)
        result = super().call_function(target, args, kwargs)
        if writes_into_inputs(target):
            self._done.clear()  # a cast made before the change is stale
        if target in CASTS and result.dtype == torch.float32 and args[0].dtype == self._plan.dtype:
            self._done[id(result), self._plan.dtype] = (args[0], result)  # there and back is the same
        if action is Action.FP32_BACK:
            return _each_tensor(result, lambda tensor: self.cast(tensor, self._plan.dtype))
        return result

    def prepared(self, action: Action, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The node's arguments in the dtypes of its action."""
        if action is Action.FP32_DTYPE:
            return with_dtype(target, args, kwargs)
        floats = [tensor.dtype for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
        dtype = read_as(action, floats, self._plan.dtype)
        if dtype is None:
            return args, kwargs
        return _each_tensor((args, kwargs), lambda tensor: self.cast(tensor, dtype))

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor`` in ``dtype``, cast at most once; integers, complex and float64 stay (as in autocast)."""
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        key = (id(tensor), dtype)
        if key not in self._done:
            # Keeps `tensor` alive: its id is the key.
            self._done[key] = (self._new_cast(tensor, dtype), tensor)
        return self._done[key][0]

    def _new_cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self._weights.get(id(tensor))
        if weight is not None and dtype == self._plan.dtype:
            rounded = half_copy(self.module, weight)
            if rounded is not None:
                return rounded
        return tensor.to(dtype)

    def _control_flow(self, node: Node, target: Any, args: Sequence[Any]) -> Any:
        """The op on bodies that run under the plan, their results in the dtypes that all paths agree on."""
        assert self._dtypes is not None
        given = captured(node, args, self._prefix, self._dtypes)
        agreed = self._dtypes.out[self._prefix + node.name]
        names = iter(prefixes(node, self._prefix))
        handed = []
        for position, arg in enumerate(args):
            if isinstance(arg, GraphModule):
                arg = self._body(arg, next(names), given, agreed)
            elif position == captured_at(node):
                # The sequence has the type that the program has: torch.onnx joins a loop's captured operands to its
                # state, and a program from an archive has lists.
                arg = type(arg)(version for one in given for version in one.versions(self.cast))
            elif position == state_at(node):
                arg = self._as_agreed(arg, agreed)
            handed.append(arg)
        return target(*handed)

    def _body(
        self, body: GraphModule, prefix: str, given: Sequence[CapturedOperand], agreed: Sequence[torch.dtype]
    ) -> Callable[..., Any]:
        def run(*flat: Any) -> Any:
            inner = Autocast(body, self._plan, self._dtypes, prefix)
            before = len(flat) - sum(one.count for one in given)
            values = [inner._known(versions) for versions in unpacked(given, flat[before:])]
            return inner._as_agreed(inner.run(*flat[:before], *values), agreed)

        return run

    def _known(self, versions: Sequence[Any]) -> Any:
        """The first version of a captured operand; a cast to another's dtype gives that other."""
        for other in versions[1:]:
            self._done[id(versions[0]), other.dtype] = (other, versions[0])
        return versions[0] if versions else None

    def _as_agreed(self, values: Any, agreed: Sequence[torch.dtype]) -> Any:
        dtypes = iter(agreed)
        return _each_tensor(values, lambda tensor: self.cast(tensor, next(dtypes)))


def stored_bytes(program: ExportedProgram) -> int:
    """Bytes of parameters, buffers and constants; a tensor that several names share counts once."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    storages = {
        t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)
    }
    return sum(storages.values())


def _count(program: ExportedProgram, half: torch.dtype) -> tuple[int, int, int]:
    """Floating-point nodes, those of them that give half, and casts between floating types."""
    nodes = halves = casts = 0
    for _, node in walk(program.graph_module):
        dtypes = _float_dtypes(node.meta.get("val"))
        if not isinstance(node.target, OpOverload) or not dtypes:
            continue
        source = _float_dtypes(node.all_input_nodes[0].meta.get("val")) if node.target in CASTS else ()
        if source and source != dtypes:
            casts += 1
        else:
            nodes += 1
            halves += half in dtypes
    return nodes, halves, casts


def _float_dtypes(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_of(value) if tensor.is_floating_point()}


def _each_tensor(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return map_aggregate(values, lambda value: change(value) if isinstance(value, Tensor) else value)


def export_as_run(
    module: GraphModule, run: Callable[..., tuple[Any, ...]], spec: ModelSpec, example: Sequence[Tensor]
) -> ExportedProgram:
    """Trace ``run`` (which interprets ``module``) with the spec's free dimensions free: the operations that the
    interpreter does become the program.

    The weights keep their names. ``example`` has a batch of at least 2 where the batch is free.
    Raises ExportFailed with torch's own explanation.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shapes = {"tensors": _dynamic(spec)}
            program = torch.export.export(
                _Run(module, run), tuple(example), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        raise ExportFailed(
            f"'{spec.name}' cannot be exported again under its precision plan: {type(error).__name__}: "
            f"{str(error)[:800]}; keep the node that torch names in FP32 with --keep, or use level O1"
        ) from error
    _tidy(program)
    return program


def _tidy(program: ExportedProgram) -> None:
    """Remove the nodes that pin dtypes, and casts that no node reads."""
    for _, node in reversed(list(walk(program.graph_module))):
        unread = node.target is torch.ops.aten.to.dtype and not node.users
        if unread or node.target is torch.ops.aten._assert_tensor_metadata.default:
            node.graph.erase_node(node)
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            module.recompile()


class _Run(nn.Module):
    """A module with the weights of a graph, under their own names, whose forward is another function."""

    def __init__(self, module: GraphModule, run: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        # the very dictionaries: the export swaps the weights in them for its own while it traces
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._run = run

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        return self._run(*tensors)


def _dynamic(spec: ModelSpec) -> tuple[dict[int, Any], ...]:
    """The batch must stay free; any other free axis is as free as the program lets it be."""
    return tuple(
        {
            axis: _freedom(spec, axis, dim.fixed, dim.minimum, dim.maximum)
            for axis, dim in enumerate(tensor.shape)
        }
        for tensor in spec.inputs
    )


def _freedom(spec: ModelSpec, axis: int, fixed: bool, low: int, high: int | None) -> Any:
    if spec.batched and axis == 0:
        return Dim.DYNAMIC(min=1, max=spec.max_batch_size) if spec.max_batch_size > 1 else Dim.AUTO
    if fixed:
        return Dim.STATIC
    return Dim.AUTO if high is None else Dim.AUTO(min=low, max=high)
