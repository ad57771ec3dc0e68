"""An ONNX file as the planner sees it (`graph.backend.Graph`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from ....models.errors import ExportFailed
from ....models.folder.package import Precision
from ....models.spec.spec import ModelSpec
from ...graph.actions import Action, Kept
from ...graph.backend import NEVER_RUN, Candidate, GraphNode, Observe, computed_from, not_shown
from ...graph.traffic import Cast, Traffic
from ...inputs.perturbed import perturbed_if_small
from ...inputs.samples import Samples, executions, few, more_executions
from ...inputs.synthetic import adversarial
from ...policy.operations import UNKNOWN, Counted, Operations, Shape
from ...policy.weights import NUMPY_HALVES, measure
from ...proof.prove import Answers, Arrays, TieTolerance
from ...question import PASSES_AT_LEAST, ROOM, Invented, Question
from ...ranges.ranges import Profile
from ...search.ranking import candidates
from ..reading.graph import FLOAT, HALVES, ForeignProgram, attribute, read_by, walk
from ..reading.typing import value_types
from .dtypes import Dtypes
from .file_rules import FileRules
from .masks import rewrite_masks
from .op_lists import ops
from .oracle import MOST_PASSES, Oracle, to_half_and_back, to_mantissa
from .profile import Range, never_run, node_profile, profile
from .rewrite import HalfGraph
from .ties import ties_of

RESCALED = "real ×"  # adversarial inputs beyond what scores are known to reach: the search's judge asks them


@dataclass(frozen=True)
class FileGraph:
    """``rules``: the level's rules for ``rules.program``, whose masks are rewritten; ``answers``: of the FP32 file.

    ``profiled`` is None where nothing is planned. ``placed``: a settled graph's dtypes, with ``searched`` kept as well.
    """

    rules: FileRules
    spec: ModelSpec
    answers: Answers
    example: Arrays
    counted: Operations = UNKNOWN
    profiled: Profile | None = None
    masks: tuple[str, ...] = ()
    searched: tuple[Kept, ...] = ()
    placed: Dtypes | None = None
    most_passes: int = MOST_PASSES  # of a Loop of the half
    _widened: dict[int, Any] = field(default_factory=dict)  # `Oracle`

    @property
    def precision(self) -> Precision:
        return self.rules.precision

    @property
    def kept(self) -> Sequence[Kept]:
        return (*self.rules.kept, *self.searched)

    @property
    def repairs(self) -> Sequence[Mapping[str, Any]]:
        return [{"node": "", "what": what, "evidence": ""} for what in self.masks]

    def operations(self) -> Operations:
        return self.counted

    def original(self, observe: Observe | None = None) -> Answers:
        program = self.rules.program
        if observe is None:
            return self.answers
        return Oracle(program.model, program.weights, observe=by_node(program.model, observe)).run

    def exact(self) -> Answers:
        return Oracle(self.rules.program.model, self.rules.program.weights).run

    def tie_tolerance(self, samples: Samples) -> TieTolerance | None:
        program = self.rules.program
        return ties_of(program.model, program.weights, self.spec, self.precision.dtype, samples)

    def candidates(self) -> list[Candidate]:
        assert self.profiled is not None
        half = self.rules.assign().half
        nodes = {node.name: node.op_type for node in self.rules.program.nodes if node.name in half}
        return candidates(self.spec, self.profiled, nodes, self.rules.doubts)

    def has_half(self, kept: Collection[str] = ()) -> bool:
        return bool(self.rules.assign(kept).half)

    def half(
        self, kept: Collection[str] = (), *, floor: bool = False, observe: Observe | None = None
    ) -> Answers:
        graph = self.rules.rewritten(self.rules.assign(kept)) if kept or not self.placed else self.written
        return self.run(graph, floor, observe)

    def run(self, graph: HalfGraph, floor: bool = False, observe: Observe | None = None) -> Answers:
        rounding = to_mantissa if floor else to_half_and_back
        seen = observe and by_node(graph.model, observe)
        return Oracle(graph.model, graph.weights, rounding, seen, self._widened, self.most_passes).run

    def repaired(self) -> None:
        """None: no repairs are known for files but those of masks."""

    def settled(self, kept: Sequence[Kept]) -> "FileGraph":
        names = [one.node for one in kept]
        placed = self.rules.placed(self.rules.assign(names), names)
        return replace(self, searched=tuple(kept), placed=placed)

    @cached_property
    def dtypes(self) -> Dtypes:
        return self.placed or self.rules.assign()

    @cached_property
    def written(self) -> HalfGraph:
        return self.rules.rewritten(self.dtypes)

    def actions(self) -> list[dict[str, str]]:
        """The rows of ``precision.json``: for each node, the precision it computes in."""
        reads, half = self.dtypes.reads, self.dtypes.half
        return [
            {
                "node": node.name,
                "op": node.op_type,
                "module": "",
                "action": (
                    Action.HALF
                    if node.name in half
                    else Action.FP32
                    if reads.get(node.name)
                    else Action.INPUT
                ).value,
            }
            for node in self.rules.program.nodes
        ]

    def traffic(self) -> Traffic:
        names = [one.node for one in self.searched]
        before = self.rules.rewritten(self.rules.assign(names))
        sizes = profile(self.rules.program, [self.example], self.precision.dtype)
        return traffic(self.written, before, sizes)

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.rules.program)

    def profile(self) -> Mapping[str, Any]:
        if self.profiled is None:  # nothing may be half
            return {
                "half": NUMPY_HALVES[self.precision.dtype].name,
                "batches": 0,
                "nodes": [],
            }
        return self.profiled.to_json()

    def weights(self) -> Sequence[Mapping[str, Any]]:
        """The rounding error of a constant that half nodes read in half, or would but for the rules (``fp32``)."""
        rules, half = self.rules, self.precision.dtype
        read = set(rules.halved(self.dtypes))
        rows = {
            name: measure(name, rules.program.weights[name], half).to_json()
            for name in sorted({*rules.ledger.asked, *read})
        }
        return [row | {"fp32": name not in read} for name, row in rows.items()]


def nodes_of(program: ForeignProgram) -> list[GraphNode]:
    makers = {output: node.name for node in program.nodes for output in node.output}
    given = {value.name for value in program.model.graph.input} - program.weights.keys()
    return [
        GraphNode(
            node.name,
            node.op_type,
            tuple(makers[name] for name in sorted(read_by(node)) if name in makers),
            not given.isdisjoint(read_by(node)),
        )
        for node in program.nodes
    ]


def makers_of(program: ForeignProgram) -> dict[str, str]:
    """The node that gives each output; an output that no node gives is left out."""
    graph = program.model.graph
    makers = {output: node.name for node in graph.node for output in node.output}
    return {value.name: makers[value.name] for value in graph.output if value.name in makers}


def file_graph(
    program: ForeignProgram,
    spec: ModelSpec,
    precision: Precision,
    planning: Samples,
    answers: Answers,
    operations: Operations = UNKNOWN,
    search: bool = False,
    fp32_outputs: frozenset[str] = frozenset(),
) -> FileGraph:
    """A file's program, profiled, with its masks rewritten where that is exact and the level's rules applied.

    ``answers``: of the FP32 file; ``search``: whether a search decides at O3; ``fp32_outputs``: all that they are
    computed from stays in FP32. Raises BadSetting for a keep pattern that matches no node.
    """
    dtype, rules = precision.dtype, FileRules(program, precision, search)
    _, example = next(planning.batches(min(3, spec.max_batch_size) if spec.batched else 0, 1))
    some = few(planning, operations)
    measured = [inputs for _, inputs in executions(spec, some)]
    graph = FileGraph(rules, spec, answers, example, operations)
    if precision.level == "O0" or not graph.has_half():
        return graph
    made = (Question((0,), inputs, {}, name) for name, inputs in adversarial(spec, some))
    odd = {one.name: one.inputs for one in Invented(answers).answered(made)}
    asked = [inputs for name, inputs in odd.items() if not name.startswith(RESCALED)]
    asked += _perturbed(spec, some, answers, operations.of(some.arrays))
    ranges = profile(program, measured, dtype)
    masks = rewrite_masks(program, ranges, [*measured, *asked])
    if masks.done:
        program = masks.program
        rules, ranges = FileRules(program, precision, search), profile(program, measured, dtype)
    hidden = computed_from(nodes_of(program), makers_of(program), fp32_outputs) if fp32_outputs else ()
    held = dict.fromkeys(_idle(program, spec, planning, some, ranges), NEVER_RUN)
    held |= {**masks.keep, **dict.fromkeys(hidden, not_shown(fp32_outputs))}
    rules.hold_back(ranges, lambda: profile(program, odd.values(), dtype), held)
    profiled = node_profile(program, ranges, dtype, len(measured))
    most = _most_passes(program, measured)
    return replace(graph, rules=rules, masks=masks.done, profiled=profiled, most_passes=most)


def _most_passes(program: ForeignProgram, measured: Sequence[Arrays]) -> int:
    """The passes that a Loop of the half may make, as `bounded_answers` has them for the original."""
    if not any(node.op_type == "Loop" for node in program.nodes):
        return MOST_PASSES
    oracle = Oracle(program.model, program.weights)
    for inputs in measured:
        oracle.run(inputs)
    return max(PASSES_AT_LEAST, ROOM * oracle.passes)


def _idle(
    program: ForeignProgram, spec: ModelSpec, planning: Samples, some: Samples, ranges: Mapping[str, Range]
) -> set[str]:
    """The nodes that no sample runs, in a batch or alone. ``ranges``: on ``some`` of the samples."""
    idle = set(never_run(program, ranges))
    for inputs in more_executions(spec, planning, some):
        if not idle:
            break
        idle &= set(never_run(program, profile(program, [inputs], "fp16")))
    return idle


def _perturbed(spec: ModelSpec, some: Samples, answers: Answers, operations: int) -> list[Arrays]:
    """Perturbed samples that the file takes; none where it refuses most."""
    invented = Invented(answers)
    questions = (
        Question(numbers, inputs, {})
        for part in perturbed_if_small(spec, some, operations)
        for numbers, inputs in executions(spec, part)
    )
    taken = [one.inputs for one in invented.answered(questions)]
    return taken if invented.is_used else []


def by_node(model: ModelProto, observe: Observe) -> Any:
    """An observer of values from an observer of nodes; casts that only the half has are left out."""
    makers = {output: node.name for node in walk(model.graph) for output in node.output if output}

    def see(name: str, array: Any, type_: int) -> None:
        if name in makers and array.dtype.kind == "f":
            observe(makers[name], array)

    return see


_NUMPY = {FLOAT: np.dtype(np.float32), **{HALVES[name]: dtype for name, dtype in NUMPY_HALVES.items()}}
_VIEWS = ops("Identity Reshape Flatten Squeeze Unsqueeze")


def traffic(half: HalfGraph, unplaced: HalfGraph, ranges: Mapping[str, Range]) -> Traffic:
    """``unplaced``: the same half before its casts were placed. ``ranges``: of the original, on the example."""
    casts = sorted(_casts(half, ranges), key=lambda cast: -cast.bytes)
    before = sum(cast.bytes for cast in _casts(unplaced, ranges))
    return Traffic(casts, before, _saved(half, ranges))


def _casts(graph: HalfGraph, ranges: Mapping[str, Range]) -> Iterator[Cast]:
    types = value_types(graph.model, graph.weights)
    nodes = list(walk(graph.model.graph))
    for node in nodes:
        if _is_cast(node) and types[node.input[0]] in set(_NUMPY) - {attribute(node, "to")}:
            source, result = (_NUMPY[types[name]] for name in (node.input[0], node.output[0]))
            readers = tuple(other.name for other in nodes if node.output[0] in other.input)
            elements = _elements(node.input[0], graph, ranges)
            moved = elements * (source.itemsize + result.itemsize)
            name = graph.sources.get(node.input[0], node.input[0])
            yield Cast(name, source.name, result.name, moved, readers)


def _saved(graph: HalfGraph, ranges: Mapping[str, Range]) -> int:
    types = value_types(graph.model, graph.weights)
    names = (
        name
        for node in walk(graph.model.graph)
        if not _is_cast(node) and node.op_type not in _VIEWS
        for name in (*node.input, *node.output)
    )
    return sum(2 * _elements(name, graph, ranges) for name in names if types.get(name) in HALVES.values())


def _elements(name: str, graph: HalfGraph, ranges: Mapping[str, Range]) -> int:
    if name in graph.weights:
        return graph.weights[name].size
    found = ranges.get(graph.sources.get(name, name))
    return found.numel if found else 1


def _is_cast(node: NodeProto) -> bool:
    return node.op_type == "Cast" and attribute(node, "to") in _NUMPY


def file_operations(program: ForeignProgram, inputs: Mapping[str, np.ndarray]) -> Operations:
    """The operations of any execution of a normalised program, estimated from one on ``inputs``.

    `UNKNOWN` where ONNX Runtime cannot run one of its nodes by itself: such a file is not planned.
    """
    counted = Counted()
    makers: dict[str, NodeProto] = {node.output[0]: node for node in walk(program.model.graph) if node.output}
    shapes: dict[str, Shape] = {name: array.shape for name, array in program.weights.items()}

    def observe(name: str, array: np.ndarray, type_: int) -> None:
        shapes[name] = array.shape
        if (node := makers.get(name)) is not None:
            counted.add(node.op_type, [shapes[read] for read in node.input if read in shapes], [array.shape])

    try:
        Oracle(program.model, program.weights, observe=observe).run(inputs)
    except ExportFailed:
        return UNKNOWN
    return counted.estimate(sum(array.size for array in inputs.values()))
