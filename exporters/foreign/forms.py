"""The one form of a foreign ONNX file, made and judged on the road (`maker.Maker`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.store import Draft
from ..gate.diagnosis import diagnosed
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..maker import Made, Say
from ..prove import Answers, Exam, answers_of, floor_report, set_exam, take
from ..sections import search_section
from .conversion import ForeignHalf, oracle_answers, whole_answers
from .stored import ties_of

CPU = torch.device("cpu")


@dataclass(slots=True)
class Foreign:
    """``half``: what `conversion.convert_onnx` made; it has settled its plan before it came onto the road."""

    half: ForeignHalf
    _planned: bool = False

    def whole(self) -> Answers:
        return whole_answers(self.half)

    @property
    def row_operations(self) -> int:
        return self.half.row_operations

    def exam(self, judging: Samples) -> Exam:
        half = self.half
        excuse = ties_of(half.whole, half.spec, half.precision.dtype, judging)
        return set_exam(half.spec, judging, self.whole(), excuse, self.row_operations)

    def plan(self, planning: Samples, share: float, say: Say) -> bool:
        first, self._planned = not self._planned, True
        return first

    def write(self, draft: Draft) -> None:
        """Nothing more: whole and half are written where they are made."""

    def make(self, name: str, draft: Draft, exam: Exam) -> Made:
        folder, half = draft.folder, self.half
        _save(half.whole, folder / "whole.onnx", half, "fp32")
        model = half.half
        if model is None:
            return Made("whole.onnx", self._runtime(folder / "whole.onnx", "fp32"))
        _save(model, folder / "half.onnx", half, half.precision.dtype)
        del model
        serves = self._runtime(folder / "half.onnx", half.precision.dtype)
        # ONNX Runtime computes FP16 chains in FP32 on a CPU: true half storage judges as well
        return Made("half.onnx", serves, [take(exam, oracle_answers(half)), take(exam, serves)])

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
            "search": half.search,
        }

    def plan_json(self) -> dict[str, Any]:
        asked = self.half.precision
        return {
            "level": asked.level,
            "dtype": asked.dtype,
            "embeddings": asked.embeddings,
            "keep": list(asked.keep),
            "lists": "torch.autocast, cuda, by ONNX op",
            "accumulation": "FP32",
            "nodes": [],
            "kept": [kept.to_json() for kept in self.half.kept],
        }

    def findings(self, exam: Exam) -> dict[str, Any]:
        half = self.half
        ops = {kept.node: kept.op for kept in half.kept}
        return {"search": search_section(half.found, ops)} if half.found else {}

    def diagnosed(self, report: ParityReport, exam: Exam) -> ParityReport:
        floor = oracle_answers(self.half, mantissa_only=True)
        return diagnosed(report, floor_report(exam, report.dtype, floor))

    def _runtime(self, path: Path, precision: str) -> Answers:
        engine = OnnxEngine(path, precision, CPU, CpuSetup(torch.get_num_threads()))
        return answers_of(self.half.spec, engine)


def _save(model: ModelProto, path: Path, half: ForeignHalf, precision: str) -> None:
    about = {"model": half.spec.name, "precision": precision, "kept": ",".join(k.node for k in half.kept)}
    for key, value in about.items():
        model.metadata_props.add(key=f"halfeven.{key}", value=value)
    onnx.save(model, path)
