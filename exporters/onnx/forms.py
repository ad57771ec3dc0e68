"""The one form of a foreign ONNX file, planned, made and judged on the road (`proof.maker.Maker`), and its original."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, ValueInfoProto

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.errors import NotRun
from ...models.folder.package import ModelFolder, Precision
from ...models.spec.datatypes import name_of
from ...models.spec.spec import ModelSpec
from ...models.store.store import Draft
from ..graph.backend import GraphNode, Observe
from ..graph.original_graph import OriginalGraph, Visit
from ..graph.traffic import Traffic
from ..inputs.samples import Samples
from ..plan.planned_forms import PlannedForms
from ..policy.operations import Operations
from ..proof.maker import Made, Maker, Notify
from ..proof.no_reference import Operation, why_drawn
from ..proof.prove import ReferenceRun, answers_of, ask_reference, take
from ..proof.subject import CPU, Subject
from ..proof.threads import fixed_threads, threads_now
from ..question import Answers, Arrays
from .as_given import ROWS, AsGiven
from .bounded_answers import bounded_answers
from .conversion import ForeignHalf, NotPlanned, read_freed, read_selected, written
from .original_file import OriginalFile, why_original
from .parted_transposes import part_transposes
from .precision.file_graph import FileGraph, by_node, file_graph, file_operations, makers_of, nodes_of
from .precision.oracle import Oracle
from .precision.ties import ties_of
from .reading.batch_first import move_batch_first
from .reading.graph import ForeignProgram, assembled, operations_by_name, read_by
from .reading.large_files import save
from .reading.signature import hold
from .runtime import (
    WatchedRun,
    answers_alone_differ,
    finished,
    refuse_paired_rows,
    runtime_answers,
)


def foreign_subject(
    asked: ModelFolder,
    samples: Samples,
    origin: Mapping[str, Any],
    search: bool | None,
    notify: Notify,
    original_because: str | None = None,
) -> tuple[Subject, Maker]:
    """A folder with an ONNX file ready for `conversion.road.travel`: read, checked against model.toml, normalised.

    What cannot be half, or cannot be planned although ONNX Runtime runs it, is served in FP32; so is what the caller
    has a reason for (``original_because``). Raises BadFolder, TooLarge, BadSetting for a fault that the operator can
    correct.
    """
    path = asked.folder / asked.source
    model, notes, _ = read_selected(path, asked)
    why = original_because or why_original(model)
    if why is None:
        try:
            return _planned_subject(path, model, asked, samples, origin, search, notify)
        except NotPlanned as error:
            refusal, why = error, f"it cannot be planned: {str(error).removeprefix(f'{path}: ')}"
    else:
        refusal = None
    move_batch_first(model.graph, asked.spec, path)
    spec, more = hold(model, asked.spec, path)
    try:
        answers = runtime_answers(model)
        answers(next(samples.batches(1 if spec.batched else 0))[1])
    except NotRun as error:
        raise refusal or error from error
    except Exception as error:  # ONNX Runtime has no narrower one
        raise refusal or NotPlanned(f"{path} is no model that can be run: {str(error)[:600]}") from error
    notify(f"{path.name} is served in FP32: {why}")
    subject = _subject(asked, spec, samples, origin, search, [*notes, *more], answers)
    return subject, OriginalFile(subject, model, answers, why)


def _planned_subject(
    path: Path,
    given: ModelProto,
    asked: ModelFolder,
    samples: Samples,
    origin: Mapping[str, Any],
    search: bool | None,
    notify: Notify,
) -> tuple[Subject, "FileForms"]:
    program, spec, notes = read_freed(path, asked, samples)
    notify(f"{path.name}: {len(program.nodes)} nodes at opset {program.opset}")
    original = assembled(program.model, program.weights)
    info = finished(original, f"{path}", NotPlanned)
    _, row = next(samples.batches(1 if spec.batched else 0))
    operations = file_operations(program, row)
    with fixed_threads(operations.of(row)):
        answers = bounded_answers(original, spec, samples)
        as_given = AsGiven(given, spec, answers)
        rows = [arrays for _, arrays in samples.batches(1 if spec.batched else 0, ROWS)]
        # Two draws of a random file may agree by chance, and the third differ.
        compared = [] if why_drawn(operations_by_name(program.model.graph)) else rows
        if wrong := next(filter(None, map(as_given.difference, compared)), None):
            raise NotPlanned(f"{path}: {wrong}")
        notes = [*notes, *as_given.notes(rows)]
    subject = _subject(asked, spec, samples, origin, search, notes, answers)
    chooses = choosing(given.graph)
    return subject, FileForms(subject, program, answers, info, operations, operations.of(row), chooses)


def _subject(
    asked: ModelFolder,
    spec: ModelSpec,
    samples: Samples,
    origin: Mapping[str, Any],
    search: bool | None,
    notes: Sequence[str],
    answers: Answers,
) -> Subject:
    """Batched only where rows are answered among others as they are alone. Raises NotRun."""
    row = answers(next(samples.batches(1 if spec.batched else 0))[1])
    drawn = samples.source == "generated" and any(
        not t.type.is_float and t.range is None for t in spec.inputs
    )
    _check_shapes(spec, row, may_be_empty=not drawn)
    if drawn:
        for _, arrays in samples.batches(1 if spec.batched else 0):
            answers(arrays)
    if spec.max_batch_size > 1 and (reason := answers_alone_differ(spec, samples, answers)):
        refuse_paired_rows(spec, samples, answers)
        spec, notes = spec.with_max_batch_size(1), [*notes, f"max_batch_size is 1: {reason}"]
    return Subject(
        program=None,
        spec=spec,
        samples=samples,
        precision=asked.precision,
        forms=("onnx",),
        source=asked.guessed or asked.folder,
        origin=origin,
        notes=(*asked.notes, *notes),
        search=search,
    )


def _check_shapes(spec: ModelSpec, came: Mapping[str, np.ndarray], may_be_empty: bool) -> None:
    """``may_be_empty``: not where an integer was drawn that may be a start or a size: others are to be tried then."""
    for tensor in spec.outputs:
        array = came[tensor.name]
        fault_of = tensor.output_fault if may_be_empty else tensor.fault
        if fault := fault_of(array.shape, name_of(array.dtype)):
            raise NotRun(f"output '{tensor.name}' of '{spec.name}': a run of the file gave another: {fault}")


@dataclass(slots=True)
class FileForms(PlannedForms[FileGraph, ForeignHalf]):
    """``answers``: of the FP32 file; ``info``: the value_info of its inner values; ``operations``: of an execution.

    ``choosing``: of the file as it was given (`choosing`).
    """

    program: ForeignProgram
    answers: Answers
    info: tuple[ValueInfoProto, ...]
    operations: Operations
    row_operations: int
    choosing: str = ""

    def original(self) -> Answers:
        return self.answers

    def operations_by_name(self) -> Sequence[Operation]:
        return operations_by_name(self.program.model.graph)

    def original_graph(self) -> OriginalGraph:
        return FileOriginal(self.program)

    def reference_run(self, judging: Samples) -> ReferenceRun:
        spec = self.subject.spec
        model, weights = self.program.model, self.program.weights
        tie_tolerance = ties_of(model, weights, spec, self.subject.precision.dtype, judging)
        by_node = Oracle(model, weights).run
        return ask_reference(spec, judging, self.answers, tie_tolerance, self.row_operations, by_node)

    def graph(self, precision: Precision, planning: Samples) -> FileGraph:
        spec, search = self.subject.spec, bool(self.subject.search)
        fp32 = self.subject.fp32_outputs
        return file_graph(
            self.program, spec, precision, planning, self.answers, self.operations, search, fp32
        )

    def written(self) -> ForeignHalf:
        return written(self.program, self.settled, self.info)

    def traffic(self) -> Traffic:
        return self.settled.traffic()

    def write(self, draft: Draft) -> None:
        """Nothing: `make` writes original and half."""

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        folder, half = draft.folder, self.half
        self._save(half.original, folder / "original.onnx", "fp32")
        model = half.half
        if model is None:
            return Made("original.onnx", self._runtime(folder / "original.onnx", "fp32"))
        dtype = self.subject.precision.dtype
        part_transposes(model)
        self._save(model, folder / "half.onnx", dtype)
        del model
        serves = self._runtime(folder / "half.onnx", dtype)
        # ONNX Runtime computes FP16 chains in FP32 on a CPU: true half storage judges as well
        return Made(
            "half.onnx", serves, [take(reference_run, self.settled.half()), take(reference_run, serves)]
        )

    def facts(self) -> dict[str, Any]:
        return PlannedForms.facts(self) | ({"choosing": self.choosing} if self.choosing else {})

    def plan_json(self) -> dict[str, Any]:
        return {
            **self.subject.precision.to_json(),
            "lists": "torch.autocast, cuda, by ONNX op",
            "accumulation": "FP32",
            "nodes": self.settled.actions(),
            "kept": [kept.to_json() for kept in self.half.kept],
        }

    def _runtime(self, path: Path, precision: str) -> Answers:
        engine = OnnxEngine(path, precision, CPU, CpuSetup(threads_now()))
        return answers_of(self.subject.spec, engine)

    def _save(self, model: ModelProto, path: Path, precision: str) -> None:
        kept = ",".join(kept.node for kept in self.half.kept)
        about = {"model": self.subject.spec.name, "precision": precision, "kept": kept}
        for key, value in about.items():
            model.metadata_props.add(key=f"halfeven.{key}", value=value)
        save(model, path)


# op → the inputs that it compares
_COMPARED = {"NonMaxSuppression": (0, 1), "TopK": (0,)}


def choosing(graph: GraphProto) -> str:
    """A sentence about the first such node of the main graph, and how to convert the model without it. Empty if the
    graph has no such node."""
    for node in graph.node:
        if node.op_type in _COMPARED:
            names = " and ".join(f"'{node.input[place]}'" for place in _COMPARED[node.op_type])
            return (
                f"what {node.op_type} '{node.name or node.output[0]}' chooses changes where {names} nearly tie: for a "
                "half of what computes them, name them as outputs under [[outputs]] in place of what is chosen, and "
                'choose outside of the model; boxes with their scores and classes may be outputs of kind = "detections"'
            )
    return ""


@dataclass(frozen=True, slots=True)
class FileOriginal:
    """An FP32 ONNX file whose run can be changed at a node (`graph.original_graph.OriginalGraph`). ``program`` is the
    file as it was read, before any mask of it is rewritten."""

    program: ForeignProgram

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.program)

    def makers(self) -> dict[str, str]:
        return makers_of(self.program)

    def watched(self, inputs: Arrays, visit: Visit) -> Arrays:
        graph = self.program.model.graph
        makers = {output: node.name for node in graph.node for output in node.output}
        read = {name for node in graph.node for name in read_by(node)} | {
            value.name for value in graph.output
        }

        def see(name: str, value: object, rest: Callable[[np.ndarray], Arrays]) -> None:
            if name in read and isinstance(value, np.ndarray) and value.dtype.kind == "f":
                visit(makers[name], value, lambda changed: rest(_as(changed, value)))

        return Oracle(self.program.model, self.program.weights).run(inputs, see)

    def as_served(self, observe: Observe) -> Answers:
        model = self.program.model
        return Oracle(model, self.program.weights, observe=by_node(model, observe)).run

    def otherwise(self, observe: Observe) -> Answers:
        """The answers as ONNX Runtime runs the file: with its sums in another order than node by node."""
        graph = self.program.model.graph
        makers = {output: node.name for node in graph.node for output in node.output if output}
        watched = WatchedRun(assembled(self.program.model, self.program.weights), list(makers))

        def answer(inputs: Arrays) -> dict[str, np.ndarray]:
            found = watched(inputs)
            for name, node in makers.items():
                if name in found and found[name].dtype.kind == "f":
                    observe(node, found[name])
            return {value.name: found[value.name] for value in graph.output}

        return answer


def _as(changed: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.asarray(changed, value.dtype).reshape(value.shape)
