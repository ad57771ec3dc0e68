"""A file that is served in FP32: nothing in it can be half, or it cannot be planned but ONNX Runtime runs it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.store.store import Draft
from ..graph.traffic import Half
from ..inputs.samples import Samples
from ..proof.maker import Made, Maker, Notify
from ..proof.prove import Answers, ReferenceRun, answers_of
from ..proof.subject import CPU, Subject
from ..proof.threads import threads_now
from ..question import Question
from ..search.delta_debugging import NOT_ASKED
from .precision.op_lists import LOWER
from .reading.bounded_file import bytes_of, tensors
from .reading.graph import FLOATING, ONNX, walk
from .reading.large_files import save

ASKED = 4  # samples on which a file is run that is served in FP32
_INTEGER_WEIGHTS = {getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (2, 4, 8, 16)}
_QUANTISED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "QLinear",
    "Integer",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "DynamicQuantize",
)


def why_original(model: ModelProto) -> str | None:
    """The reason why nothing of a file is made half, by its nodes and constants alone; None where something may be."""
    nodes = list(walk(model.graph))
    foreign = sorted({node.op_type for node in nodes if node.domain == "ai.onnx.ml"})
    if foreign and not any(node.op_type in LOWER and node.domain in ONNX for node in nodes):
        return f"it has operators of ai.onnx.ml ({', '.join(foreign[:3])}), which compute in FP32 only"
    constants = list(tensors(model))
    if any(word in node.op_type for node in nodes for word in _QUANTISED):
        small, wide = _elements(constants, _INTEGER_WEIGHTS), _elements(constants, FLOATING)
        if small >= wide:
            return (
                f"it is quantised: {small} of its {small + wide} weights are integers already, which half precision "
                "would neither make smaller nor faster"
            )
    return None


def _elements(constants: Iterable[TensorProto], types: Iterable[int]) -> int:
    return sum(prod(tensor.dims) for tensor in constants if tensor.data_type in types)


@dataclass(slots=True)
class OriginalFile(Maker):
    """The one form of a file that is served as it is (`proof.maker.Maker`), ``because`` of what.

    ``answers``: as ONNX Runtime's CPU gives them.
    """

    subject: Subject
    model: ModelProto
    answers: Answers
    because: str
    planned: bool = False

    def reference_run(self, judging: Samples) -> ReferenceRun:
        """The answers to a few samples, which show that the file runs. Nothing is half, so nothing is judged."""
        spec, some = self.subject.spec, judging.take(slice(0, ASKED))
        batches = some.batches(min(spec.max_batch_size, ASKED) if spec.batched else 0)
        bulk = [Question(samples, inputs, self.answers(inputs)) for samples, inputs in batches]
        return ReferenceRun(spec, small=[], bulk=bulk, adversarial=[], targets=some.targets)

    def plan(self, planning: Samples, share: float, notify: Notify) -> bool:
        first, self.planned = not self.planned, True
        return first

    def original(self) -> Answers:
        return self.answers

    def serve_original(self, because: str) -> None:
        """Nothing else is made."""

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        path: Path = draft.folder / "original.onnx"
        save(self.model, path)
        self.answers = (
            dict  # closes that session before another is opened: of trees each takes eight times the file
        )
        engine = OnnxEngine(path, "fp32", CPU, CpuSetup(threads_now()))
        self.answers = answers_of(self.subject.spec, engine)
        return Made(path.name, self.answers)

    def facts(self) -> dict[str, Any]:
        nodes = sum(1 for _ in walk(self.model.graph))
        size = sum(map(bytes_of, tensors(self.model)))
        none = Half(nodes, 0, nodes, (), 0, size, size)
        return none.facts() | {"search": NOT_ASKED, "original_because": self.because}

    def plan_json(self) -> dict[str, Any]:
        return {
            **self.subject.precision.to_json(),
            "lists": "none: the file is served in FP32",
            "accumulation": "FP32",
            "nodes": [],
            "kept": [],
        }
