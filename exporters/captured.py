"""The forms of a captured program: the half program itself (torch), and what is written from it (ONNX)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..models.archive import save_program
from ..models.engines.arrays import to_torch
from ..models.engines.onnx_engine import OnnxEngine
from ..models.engines.torch_engine import TorchEngine
from ..models.store import Draft
from .autocast import HalfProgram, rewrite
from .maker import Made, Say
from .onnx import write_onnx
from .planning import Planner
from .prove import Answers, Exam, answers_of, check_whole_form, emulated
from .samples import Samples
from .subject import Subject

CPU = torch.device("cpu")


@dataclass(slots=True)
class Captured:
    """Makes the forms of an exported program (`maker.Maker`)."""

    subject: Subject
    half: HalfProgram = field(init=False)
    planner: Planner | None = None
    _whole: Answers | None = None
    _storage: Answers | None = None
    _whole_onnx: Answers | None = None

    def whole(self) -> Answers:
        if self._whole is None:
            self._whole = answers_of(self.subject.spec, TorchEngine(self.subject.program, "fp32", CPU))
        return self._whole

    def plan(self, planning: Samples, share: float, say: Say) -> bool:
        example = _example(self.subject)
        if self.planner is None:
            self.planner = Planner(self.subject, planning, example, say)
        if not self.planner.settle(share, say):
            return False
        say("rewriting")
        subject, planner = self.subject, self.planner
        self.half = rewrite(subject.program, planner.plan, subject.spec, example, planner.module)
        self._storage = None
        return True

    def write(self, draft: Draft) -> None:
        folder, program = draft.folder, self.subject.program
        save_file(_untied(program.state_dict), folder / "weights.safetensors")
        save_program(program, folder / "whole.pt2", weights=False)

    def make(self, name: str, draft: Draft, exam: Exam) -> Made:
        half = self.half.half_nodes > 0
        if name == "torch":
            if half:
                save_program(self.half.program, draft.folder / "half.pt2", weights=True)
            return (
                Made("half.pt2", self.storage(), [self._taken()]) if half else Made("whole.pt2", self.whole())
            )
        whole = self._onnx(draft, exam)
        return self._half_onnx(draft) if half else Made("whole.onnx", whole)

    def storage(self) -> Answers:
        """The half program in true half kernels."""
        if self._storage is None:
            engine = TorchEngine(self.half.program, self.subject.precision.dtype, CPU)
            self._storage = answers_of(self.subject.spec, engine)
        return self._storage

    def facts(self) -> dict[str, Any]:
        half = self.half
        return {
            "nodes": half.nodes,
            "half_nodes": half.half_nodes,
            "fp32_by_policy": half.plan.fp32_by_policy,
            "kept": [kept.to_json() for kept in half.plan.kept],
            "casts": half.casts,
            "bytes": half.bytes,
            "bytes_fp32": half.bytes_fp32,
        }

    def plan_json(self) -> dict[str, Any]:
        assert self.planner is not None
        return self.half.plan.to_json(self.planner.module)

    def findings(self, exam: Exam) -> dict[str, Any]:
        assert self.planner is not None
        return self.planner.findings()

    def _taken(self) -> tuple[Answers, Answers]:
        assert self.planner is not None
        return self.storage(), emulated(self.subject.spec, self.planner.emulation())

    def _onnx(self, draft: Draft, exam: Exam) -> Answers:
        """The whole as ONNX, held against the program: an exporter's fault is never blamed on half."""
        if self._whole_onnx is None:
            path, spec = draft.folder / "whole.onnx", self.subject.spec
            about = {"model": spec.name, "precision": "fp32"}
            write_onnx(self.subject.program, spec, path, about)
            answers = answers_of(spec, OnnxEngine(path, "fp32", CPU))
            check_whole_form(exam, answers)
            self._whole_onnx = answers
        return self._whole_onnx

    def _half_onnx(self, draft: Draft) -> Made:
        spec, asked, path = self.subject.spec, self.subject.precision, draft.folder / "half.onnx"
        kept = ",".join(kept.node for kept in self.half.plan.kept)
        about = {"model": spec.name, "precision": asked.dtype, "level": asked.level, "kept": kept}
        write_onnx(self.half.program, spec, path, about)
        serves = answers_of(spec, OnnxEngine(path, asked.dtype, CPU))
        # ONNX Runtime computes FP16 chains in FP32 on a CPU: the program's own half storage judges as well
        return Made("half.onnx", serves, [self._taken(), (serves, None)])


def _example(subject: Subject) -> list[Tensor]:
    """A batch to trace with: of at least 2 where the batch is free."""
    spec = subject.spec
    rows = min(3, max(1, spec.max_batch_size)) if spec.batched else 0
    _, arrays = next(iter(subject.samples.batches(rows, 1)))
    return [to_torch(arrays[tensor.name]) for tensor in spec.inputs]


def _untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses names that share memory; each is written whole, and the program ties them again."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
