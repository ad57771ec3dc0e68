"""A captured program (torch.fx) as the planner sees it (`graph.backend.Graph`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from ...models.engines.arrays import to_numpy, to_torch
from ...models.folder.package import Precision
from ...models.program import duplicate, runnable, walk
from ...models.spec.spec import ModelSpec
from ..graph.actions import Kept
from ..graph.backend import NEVER_RUN, Candidate, GraphNode, Observe, computed_from, not_shown
from ..inputs.samples import Samples, executions, few, more_executions
from ..policy.classes import Trait, has
from ..policy.operations import Counted, Operations
from ..proof.subject import Subject
from ..question import Answers, Arrays, TieTolerance
from ..ranges.guards import aten_name, lift_guards
from ..ranges.profile import profile
from ..ranges.ranges import Profile
from ..ranges.repairs import Repair, apply
from ..ranges.repairs import candidates as repairable
from ..ranges.sentinels import rewrite_sentinels
from ..search.ranking import candidates
from .autocast.aliases import uncastable
from .autocast.bodies import ran
from .autocast.dtypes import Typing, tensors_of
from .autocast.earlier_runs import EarlierRuns
from .autocast.emulation import Emulation, InDouble, RoundedWeights, half_rounding, mantissa_rounding
from .autocast.kernels import OF_CPU, HalfKernels, half_kernels, in_one_dtype, keep_without_kernel
from .autocast.ledger import Ledger, weigh
from .autocast.placement import place
from .autocast.plan import PrecisionPlan, make_plan, op_name
from .autocast.policy import CUDA
from .autocast.rewrite import HalfProgram, rewrite
from .autocast.surgery import open_composites
from .bounded_calls import Bounds, within
from .program_answers import emulated, ties_of


@dataclass(frozen=True)
class ProgramGraph:
    """``module``: prepared (`models.program.runnable`), repaired or not; ``plan``: by the level's rules.

    ``inputs``: a batch of each, to trace with. ``kernels``: of the device that it is planned for. ``weighed`` and
    ``profiled`` are None at O0, which plans nothing. ``rounded``: of the module's weights, for the halves of all plans,
    and ``earlier``: their values on the samples, until a plan is settled. ``held``: the nodes that are kept beside
    those of the level's rules. ``bounds``: of what any input may ask.
    """

    module: GraphModule
    spec: ModelSpec
    plan: PrecisionPlan
    inputs: Sequence[Tensor]
    onnx: bool = False
    search: bool | None = False
    kernels: HalfKernels = OF_CPU
    weighed: Ledger | None = None
    profiled: Profile | None = None
    repaired_by: tuple[Repair, ...] = ()
    held: tuple[Kept, ...] = ()
    bytes_before: int = 0
    rounded: RoundedWeights = field(default_factory=RoundedWeights)
    earlier: EarlierRuns | None = None
    bounds: Bounds | None = None

    @property
    def precision(self) -> Precision:
        return self.plan.precision

    @property
    def kept(self) -> Sequence[Kept]:
        return self.plan.kept

    @property
    def repairs(self) -> Sequence[Mapping[str, Any]]:
        return [repair.to_json() for repair in self.repaired_by]

    def operations(self) -> Operations:
        return self._operations

    @cached_property
    def _operations(self) -> Operations:
        return program_operations(self.module, self.inputs)  # which runs the model

    @cached_property
    def typing(self) -> Typing:
        return Typing(self.module, self.inputs)

    @cached_property
    def _uncastable(self) -> set[str]:
        return uncastable(self.module)

    @property
    def example(self) -> Arrays:
        return {
            tensor.name: to_numpy(held) for tensor, held in zip(self.spec.inputs, self.inputs, strict=True)
        }

    def original(self, observe: Observe | None = None) -> Answers:
        nothing = make_plan(self.module, replace(self.precision, level="O0", keep=()))
        return within(self.bounds, emulated(self.spec, self._emulation(nothing, observe=observe)))

    def exact(self) -> Answers:
        return within(self.bounds, exact_answers(self.module, self.spec))

    def tie_tolerance(self, samples: Samples) -> TieTolerance | None:
        return ties_of(self.module, self.spec, self.precision.dtype, samples)

    def candidates(self) -> list[Candidate]:
        assert self.profiled is not None and self.weighed is not None
        touches, ruled = self.typing.under(self.plan).touches_half, {kept.node for kept in self.kept}
        nodes = {
            name: op_name(node)
            for name, node in walk(self.module)
            if name in self.plan.actions
            and name not in ruled
            and touches(name)
            and name not in self._uncastable
        }
        return candidates(self.spec, self.profiled, nodes, self.weighed.doubts)

    def has_half(self, kept: Collection[str] = ()) -> bool:
        dtypes = self.typing.under(self._keeping(kept))
        return any(dtypes.is_half(name) for name in dtypes.out)

    def half(
        self, kept: Collection[str] = (), *, floor: bool = False, observe: Observe | None = None
    ) -> Answers:
        half = emulated(self.spec, self._emulation(self._keeping(kept), floor, observe))
        return within(self.bounds, half)

    def repaired(self) -> "ProgramGraph | None":
        assert self.profiled is not None
        proposals = repairable(self.module, self.profiled)
        if not proposals:
            return None
        module = duplicate(self.module)
        for repair in proposals:
            apply(module, repair)
        repaired_by = (*self.repaired_by, *proposals)
        return _ruled(replace(self, module=module, repaired_by=repaired_by, rounded=RoundedWeights()))

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.module)

    def profile(self) -> Mapping[str, Any]:
        return self.profiled.to_json() if self.profiled else {}

    def weights(self) -> Sequence[Mapping[str, Any]]:
        return self.weighed.to_json() if self.weighed else []

    def settled(self, kept: Sequence[Kept]) -> "ProgramGraph":
        if self.precision.level == "O0":
            return self
        outputs = [tensor.type.torch for tensor in self.spec.outputs]
        placed = place(self.module, self.plan.keeping(kept), self.inputs, outputs)
        if self.earlier is not None:
            self.earlier.forget()
        return replace(self, plan=placed.plan, bytes_before=placed.bytes_before, earlier=None)

    def written(self, original: ExportedProgram) -> HalfProgram:
        return rewrite(original, self.plan, self.spec, self.inputs, self.module)

    def _keeping(self, names: Collection[str]) -> PrecisionPlan:
        nodes = dict(walk(self.module))
        return self.plan.keeping([Kept(name, op_name(nodes[name]), "") for name in names])

    def _emulation(
        self, plan: PrecisionPlan, floor: bool = False, observe: Observe | None = None
    ) -> Emulation:
        rounding = (mantissa_rounding if floor else half_rounding)(self.plan.dtype)
        weights, earlier = (None, None) if floor else (self.rounded, self.earlier)
        dtypes = self.typing.under(plan)
        return Emulation(
            self.module, dtypes, rounding, observe, opened=self.onnx, weights=weights, earlier=earlier
        )


def program_graph(
    subject: Subject, planning: Samples, example: Sequence[Tensor], bounds: Bounds | None = None
) -> ProgramGraph:
    """A subject's program, profiled, with its masks rewritten where that is exact and the level's rules applied."""
    module, precision = runnable(subject.exported), subject.precision
    onnx = "onnx" in subject.forms
    if precision.level == "O0":
        return ProgramGraph(module, subject.spec, make_plan(module, precision), example, onnx, bounds=bounds)
    open_composites(module, CUDA)
    kernels = half_kernels(torch.device(subject.device))
    plan = make_plan(module, precision, half_loops=kernels.of_loops)
    if precision.level == "O3":
        lift_guards(module, precision.dtype)
    some = few(planning, program_operations(module, example))
    profiled = profile(module, _batches(subject.spec, some), precision.dtype)
    never_run = _never_run(module, subject.spec, planning, some, profiled)
    masks = rewrite_sentinels(module, profiled)
    graph = ProgramGraph(
        module,
        subject.spec,
        plan,
        example,
        onnx,
        subject.search,
        kernels,
        profiled=profiled,
        repaired_by=masks.repairs,
        held=(*masks.keep, *_behind(module, subject), *never_run),
        bounds=bounds,
    )
    return _ruled(graph)


def _ruled(graph: ProgramGraph) -> ProgramGraph:
    """The graph with the plan that the rules give its module."""
    plan = make_plan(graph.module, graph.precision, half_loops=graph.kernels.of_loops)
    plan = in_one_dtype(graph.module, plan, graph.inputs, graph.kernels)
    if graph.held:
        touches = graph.typing.under(plan).touches_half
        plan = plan.keeping([kept for kept in graph.held if touches(kept.node)])
    plan = keep_without_kernel(graph.module, plan, graph.inputs, graph.kernels, onnx=graph.onnx)
    searched = bool(graph.search) and graph.precision.level == "O3"
    weighed, plan = weigh(graph.module, plan, graph.inputs, searched)
    return replace(graph, plan=plan, weighed=weighed, earlier=EarlierRuns(graph.module))


def _never_run(
    module: GraphModule, spec: ModelSpec, planning: Samples, some: Samples, profiled: Profile
) -> list[Kept]:
    """The operations that give no number on any sample, in a batch or alone, but those that only move values.
    ``profiled``: on ``some`` of the samples."""
    idle = set(profiled.never_ran)
    for inputs in more_executions(spec, planning, some):
        if not idle:
            return []
        idle &= set(profile(module, [_tensors(spec, inputs)], profiled.half).never_ran)
    idle -= uncastable(module)
    return [
        Kept(name, op_name(node), NEVER_RUN)
        for name, node in walk(module)
        if name in idle and not has(aten_name(node), Trait.MOVES)
    ]


def _behind(module: GraphModule, subject: Subject) -> list[Kept]:
    """The nodes that the outputs which stay in FP32 are computed from; none where all outputs may be half."""
    outputs = subject.fp32_outputs
    if not outputs:
        return []
    computing = [node for node in nodes_of(module) if node.op != "output"]
    found = computed_from(computing, makers_of(module, subject.spec), outputs)
    found -= uncastable(module)
    return [
        Kept(name, op_name(node), not_shown(outputs))
        for name, node in walk(module)
        if name in found and isinstance(node.target, OpOverload)
    ]


def _batches(spec: ModelSpec, samples: Samples) -> Iterator[list[Tensor]]:
    for _, arrays in executions(spec, samples):
        yield _tensors(spec, arrays)


def _tensors(spec: ModelSpec, arrays: Arrays) -> list[Tensor]:
    return [to_torch(arrays[tensor.name].copy()) for tensor in spec.inputs]


def exact_answers(module: GraphModule, spec: ModelSpec) -> Answers:
    """An original program (`models.program.runnable`) in FP64."""
    return emulated(spec, InDouble(module))


def nodes_of(module: GraphModule) -> list[GraphNode]:
    return list(_nodes(module, "", ()))


def makers_of(module: GraphModule, spec: ModelSpec) -> dict[str, str]:
    """The node that gives each output."""
    given = module.graph.output_node().args[0]
    assert isinstance(given, tuple | list)
    pairs = zip(spec.outputs, given, strict=True)
    return {tensor.name: node.name for tensor, node in pairs if isinstance(node, Node)}


def _nodes(module: GraphModule, prefix: str, given: tuple[str, ...]) -> Iterator[GraphNode]:
    """``given``: the nodes that a body's inputs come from."""
    for node in module.graph.nodes:
        body = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            operands = {prefix + source.name for user in node.users for source in user.all_input_nodes}
            yield from _nodes(body, f"{prefix}{node.target}.", tuple(sorted(operands)))
        inputs = tuple(prefix + source.name for source in node.all_input_nodes)
        is_input = node.op == "placeholder"
        yield GraphNode(prefix + node.name, _op(node), given if is_input else inputs, is_input and not prefix)


def _op(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema:
        return schema.name.removeprefix("aten::")
    return getattr(node.target, "__name__", str(node.target))


def program_operations(module: GraphModule, inputs: Sequence[Tensor]) -> Operations:
    """The operations of any execution of an original (`models.program.runnable`), estimated from one on ``inputs``,
    with loops and branches as these inputs have them."""
    counted = Counted()
    with torch.inference_mode():
        _Counting(module, counted).run(*[tensor.clone() for tensor in inputs])
    return counted.estimate(sum(tensor.numel() for tensor in inputs))


class _Counting(Interpreter):
    """Runs a program and counts its operations. Views give no elements."""

    def __init__(self, module: GraphModule, counted: Counted) -> None:
        super().__init__(module)
        self._counted = counted

    def run_node(self, n: Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            args, _ = self.fetch_args_kwargs_from_env(n)
            return ran(n, args, "", self._run_body)
        result = super().run_node(n)
        if isinstance(n.target, OpOverload):
            name = n.target._schema.name.removeprefix("aten::")
            results = () if n.target.is_view else tensors_of(result)
            self._counted.add(name, self._shapes_read(n), [tensor.shape for tensor in results])
        return result

    def _run_body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        results = _Counting(body, self._counted).run(*operands)
        return results if isinstance(results, tuple | list) else (results,)

    def _shapes_read(self, node: Node) -> list[torch.Size]:
        read = map_arg((node.args, node.kwargs), lambda source: self.env[source])
        return [tensor.shape for tensor in tensors_of(read)]
