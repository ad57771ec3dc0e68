"""The one form of a foreign ONNX file, planned, made and judged on the road (`maker.Maker`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto, ValueInfoProto

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.package import ModelFolder
from ...models.store import Draft
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..maker import Made, Notify
from ..operations import Operations
from ..plan.findings import findings, with_diagnosis
from ..plan.planner import Planner
from ..prove import Answers, ReferenceRun, answers_of, ask_reference, take
from ..search.delta_debugging import NOT_ASKED
from ..subject import Subject
from ..threads import fixed_threads
from .conversion import ForeignHalf, read_foreign, written
from .file_graph import FileGraph, file_graph
from .file_operations import file_operations
from .graph import ForeignProgram, assembled
from .oracle import Oracle
from .runtime import answers_alone_differ, finished, runtime_answers
from .stored import ties_of

CPU = torch.device("cpu")


def foreign_subject(
    asked: ModelFolder, samples: Samples, origin: Mapping[str, Any], search: bool, notify: Notify
) -> tuple[Subject, "Foreign"]:
    """A folder with an ONNX file ready for the road (`road.travel`): read, held against model.toml, normalised.

    Raises BadFolder, TooLarge or BadSetting for what the operator can mend.
    """
    path = asked.folder / asked.source
    program, spec, notes = read_foreign(path, asked)
    notify(f"{path.name}: {len(program.nodes)} nodes at opset {program.opset}")
    whole = assembled(program.model, program.weights)
    info = finished(whole, f"{path}")
    _, row = next(samples.batches(1 if spec.batched else 0))
    operations = file_operations(program, row)
    with fixed_threads(operations.of(row)):
        answers = runtime_answers(whole)
    if spec.max_batch_size > 1 and (reason := answers_alone_differ(spec, samples, answers)):
        spec, notes = spec.with_max_batch_size(1), [*notes, f"max_batch_size is 1: {reason}"]
    subject = Subject(
        program=None,
        spec=spec,
        samples=samples,
        precision=asked.precision,
        forms=("onnx",),
        source=asked.folder,
        origin=origin,
        notes=tuple(notes),
        search=search,
    )
    return subject, Foreign(subject, program, answers, info, operations, operations.of(row))


@dataclass(slots=True)
class Foreign:
    """``answers``: of the FP32 file; ``info``: the value_info of its inner values; ``operations``: of an execution."""

    subject: Subject
    program: ForeignProgram
    answers: Answers
    info: tuple[ValueInfoProto, ...]
    operations: Operations
    row_operations: int
    planner: Planner[FileGraph] | None = None
    settled: FileGraph = field(init=False)
    half: ForeignHalf = field(init=False)

    def whole(self) -> Answers:
        return self.answers

    def reference_run(self, judging: Samples) -> ReferenceRun:
        spec = self.subject.spec
        whole = assembled(self.program.model, self.program.weights)
        tie_tolerance = ties_of(whole, spec, self.subject.precision.dtype, judging)
        by_node = Oracle(self.program.model, self.program.weights).run
        return ask_reference(spec, judging, self.answers, tie_tolerance, self.row_operations, by_node)

    def plan(self, planning: Samples, share: float, notify: Notify) -> bool:
        subject = self.subject
        if self.planner is None:
            notify("profiling")
            graph = file_graph(
                self.program, subject.spec, subject.precision, planning, self.answers, self.operations
            )
            self.planner = Planner(graph, planning, subject.search)
        if not self.planner.settle(share, notify):
            return False
        notify("rewriting")
        plan = self.planner.plan
        self.settled = plan.graph.settled(plan.searched)
        self.half = written(self.program, self.settled, self.info)
        return True

    def nearest(self, notify: Notify) -> str:
        return self.planner.nearest(notify) if self.planner else ""

    def write(self, draft: Draft) -> None:
        """Nothing more: whole and half are written where they are made."""

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        folder, half = draft.folder, self.half
        self._save(half.whole, folder / "whole.onnx", "fp32")
        model = half.half
        if model is None:
            return Made("whole.onnx", self._runtime(folder / "whole.onnx", "fp32"))
        dtype = self.subject.precision.dtype
        self._save(model, folder / "half.onnx", dtype)
        del model
        serves = self._runtime(folder / "half.onnx", dtype)
        # ONNX Runtime computes FP16 chains in FP32 on a CPU: true half storage judges as well
        return Made(
            "half.onnx", serves, [take(reference_run, self.settled.half()), take(reference_run, serves)]
        )

    def facts(self) -> dict[str, Any]:
        half = self.half
        return {
            "nodes": half.nodes,
            "half_nodes": half.half_nodes,
            "fp32_by_policy": half.fp32_by_policy,
            "kept": [kept.to_json() for kept in half.kept],
            "casts": half.casts,
            "bytes": half.bytes,
            "bytes_fp32": half.bytes_fp32,
            "search": self.planner.search if self.planner else NOT_ASKED,
        }

    def plan_json(self) -> dict[str, Any]:
        asked = self.subject.precision
        return {
            "level": asked.level,
            "dtype": asked.dtype,
            "embeddings": asked.embeddings,
            "keep": list(asked.keep),
            "lists": "torch.autocast, cuda, by ONNX op",
            "accumulation": "FP32",
            "nodes": self.settled.actions(),
            "kept": [kept.to_json() for kept in self.half.kept],
        }

    def findings(self, reference_run: ReferenceRun) -> dict[str, Any]:
        assert self.planner is not None
        return findings(self.settled, self.planner.plan.found, self.settled.traffic())

    def diagnosed(self, report: ParityReport, reference_run: ReferenceRun) -> ParityReport:
        return with_diagnosis(self.settled, report, reference_run)

    def _runtime(self, path: Path, precision: str) -> Answers:
        engine = OnnxEngine(path, precision, CPU, CpuSetup(torch.get_num_threads()))
        return answers_of(self.subject.spec, engine)

    def _save(self, model: ModelProto, path: Path, precision: str) -> None:
        kept = ",".join(kept.node for kept in self.half.kept)
        about = {"model": self.subject.spec.name, "precision": precision, "kept": kept}
        for key, value in about.items():
            model.metadata_props.add(key=f"halfeven.{key}", value=value)
        onnx.save(model, path)
