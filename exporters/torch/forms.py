"""The forms of a captured program: the half program itself (torch), and the ONNX file written from it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from ...models.archive.archive import save_program
from ...models.capture.capture import capture
from ...models.engines.arrays import floats_of, to_numpy, to_torch
from ...models.engines.cpu.setup import PACKED, CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.engines.torch_engine import TorchEngine
from ...models.engines.true_fp32 import use_true_fp32
from ...models.errors import CaptureFailed, HalfevenError
from ...models.files.tensor_file import save_tensors
from ...models.folder.package import ModelFolder, Precision
from ...models.program import runnable, walk
from ...models.spec.spec import ModelSpec
from ...models.store.store import Draft
from ..gate.steppers import Watched, rest_of_run
from ..graph.backend import GraphNode, Observe
from ..graph.original_graph import OriginalGraph, Visit
from ..graph.traffic import Cast, Traffic
from ..inputs.samples import Samples
from ..inputs.synthetic import in_range, with_smaller_integers
from ..onnx.parted_transposes import part_transposes_in
from ..onnx.reading.large_files import remove_onnx
from ..onnx.stored import half_file_on_cpu
from ..plan.planned_forms import PlannedForms
from ..proof.maker import Made
from ..proof.no_reference import Operation
from ..proof.prove import (
    ReferenceRun,
    Taken,
    answers_of,
    ask_reference,
    check_original_form,
    take,
)
from ..proof.subject import Subject
from ..question import Answers, Arrays
from .autocast.aliases import aliased
from .autocast.dtypes import tensors_of
from .autocast.emulation import InDouble
from .autocast.rewrite import HalfProgram
from .bounded_calls import Bounds, bounds_of, held, within
from .onnx_form.export import write_onnx
from .program_answers import emulated, ties_of
from .program_graph import ProgramGraph, exact_answers, makers_of, nodes_of, program_graph, program_operations


@dataclass(slots=True)
class ProgramForms(PlannedForms[ProgramGraph, HalfProgram]):
    """Makes the forms of an exported program (`proof.maker.Maker`)."""

    _original: Answers | None = None
    _module: GraphModule | None = None
    _row_operations: int | None = None
    _bounds: list[Bounds | None] = field(
        default_factory=list
    )  # of one, once it is asked for; None is an answer

    @property
    def bounds(self) -> Bounds | None:
        if not self._bounds:
            self._bounds.append(bounds_of(self.module, self.subject.spec, self.subject.samples))
        return self._bounds[0]

    @property
    def device(self) -> torch.device:
        """The device whose kernels the plan asks, and on which the forms are proven."""
        return torch.device(self.subject.device)

    @property
    def module(self) -> GraphModule:
        """The original, prepared; nothing changes it."""
        if self._module is None:
            self._module = runnable(self.subject.exported)
        return self._module

    @property
    def row_operations(self) -> int:
        if self._row_operations is None:
            subject = self.subject
            _, row = next(subject.samples.batches(1 if subject.spec.batched else 0))
            tensors = [to_torch(row[tensor.name]) for tensor in subject.spec.inputs]
            self._row_operations = program_operations(self.module, tensors).of(row)
        return self._row_operations

    def original(self) -> Answers:
        if self._original is None:
            spec = self.subject.spec
            engine = TorchEngine(self.subject.exported, "fp32", self.device, spec=spec)
            self._original = within(self.bounds, answers_of(spec, engine))
        return self._original

    def operations_by_name(self) -> Sequence[Operation]:
        nodes = (node for _, node in walk(self.module) if node.op == "call_function")
        return [(node.name, getattr(node.target, "__name__", "").split(".")[0]) for node in nodes]

    def original_graph(self) -> OriginalGraph:
        return ProgramOriginal(self.module, self.subject.spec, self.bounds)

    def reference_run(self, judging: Samples) -> ReferenceRun:
        subject = self.subject
        tie_tolerance = ties_of(self.module, subject.spec, subject.precision.dtype, judging)
        exact = within(self.bounds, exact_answers(self.module, subject.spec))
        use_true_fp32()
        return ask_reference(
            subject.spec, judging, self.original(), tie_tolerance, self.row_operations, exact, subject.device
        )

    def graph(self, precision: Precision, planning: Samples) -> ProgramGraph:
        subject = replace(self.subject, precision=precision)
        return program_graph(subject, planning, _example(subject.spec, planning), self.bounds)

    def written(self) -> HalfProgram:
        return self.settled.written(self.subject.exported)

    def traffic(self) -> Traffic:
        program = self.half.program
        return Traffic(cast_map(program), self.settled.bytes_before, saved_bytes(program))

    def write(self, draft: Draft) -> None:
        folder, program = draft.folder, self.subject.exported
        save_tensors(folder / "weights.safetensors", _untied(program.state_dict))
        save_program(program, folder / "original.pt2", weights=False)

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        half = self.half.half_nodes > 0
        if name == "torch":
            return self._half_torch(draft, reference_run) if half else Made("original.pt2", self.original())
        self._write_original_onnx(draft, reference_run)
        if half:
            return self._half_onnx(draft, reference_run)
        return Made("original.onnx", self._onnx(draft.folder / "original.onnx", "fp32"))

    def storage(self) -> Answers:
        """The half program in true half kernels of the subject's device."""
        spec, dtype = self.subject.spec, self.subject.precision.dtype
        return within(
            self.bounds, answers_of(spec, TorchEngine(self.half.program, dtype, self.device, spec=spec))
        )

    def plan_json(self) -> dict[str, Any]:
        return self.half.plan.to_json(self.settled.module)

    def _half_torch(self, draft: Draft, reference_run: ReferenceRun) -> Made:
        save_program(self.half.program, draft.folder / "half.pt2", weights=True)
        serves = self.storage()
        taken = take(reference_run, serves, self.settled.half())
        return Made("half.pt2", serves, [taken, *self._taken_packed(reference_run)])

    def _taken_packed(self, reference_run: ReferenceRun) -> list[Taken]:
        """The answers with packed kernels, where a server may choose them for a half that this processor multiplies
        itself: every way in which the half may serve is judged."""
        subject = self.subject
        if subject.precision.dtype != "bf16" or self.device.type != "cpu":
            return []
        engine = TorchEngine(self.half.program, subject.precision.dtype, self.device, CpuSetup(passes=PACKED))
        if not engine.setup.passes:
            return []
        return [take(reference_run, within(self.bounds, answers_of(self.subject.spec, engine)))]

    def _write_original_onnx(self, draft: Draft, reference_run: ReferenceRun) -> None:
        """Write the original as ONNX and compare it with the program, so that a fault of the exporter does not count as
        half's.

        Raises ExportFailed where the answers differ; no file is left then. Otherwise the file stays and may serve, also
        where the half is refused.
        """
        path, spec = draft.folder / "original.onnx", self.subject.spec
        if not path.exists():
            write_onnx(self.subject.exported, spec, path, {"model": spec.name, "precision": "fp32"})
            try:
                threads = CpuSetup(torch.get_num_threads())
                engine = OnnxEngine(path, "fp32", self.subject.device, threads, packed=False)
                check_original_form(reference_run, answers_of(spec, engine))
            except HalfevenError:
                remove_onnx(path)
                raise

    def _half_onnx(self, draft: Draft, reference_run: ReferenceRun) -> Made:
        spec, asked, path = self.subject.spec, self.subject.precision, draft.folder / "half.onnx"
        kept = ",".join(kept.node for kept in self.half.kept)
        about = {"model": spec.name, "precision": asked.dtype, "level": asked.level, "kept": kept}
        write_onnx(self.half.program, spec, path, about)
        part_transposes_in(path)
        if self.device.type == "cpu":
            return Made("half.onnx", *half_file_on_cpu(path, spec, asked.dtype, reference_run))
        serves = self._onnx(path, asked.dtype)
        return Made("half.onnx", serves, [take(reference_run, serves)])

    def _onnx(self, path: Path, precision: str) -> Answers:
        engine = OnnxEngine(path, precision, self.subject.device, CpuSetup(torch.get_num_threads()))
        return answers_of(self.subject.spec, engine)


def _example(spec: ModelSpec, planning: Samples) -> list[Tensor]:
    """A batch to trace with: of at least 2 where the batch is free."""
    rows = min(3, max(1, spec.max_batch_size)) if spec.batched else 0
    _, arrays = next(iter(planning.batches(rows, 1)))
    return [to_torch(arrays[tensor.name]) for tensor in spec.inputs]


def _untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses names that share memory; each is written whole, and the program ties them again."""
    shared = Counter(tensor.untyped_storage()._cdata for tensor in state.values())
    return {
        name: tensor.detach().clone()
        if shared[tensor.untyped_storage()._cdata] > 1
        else tensor.detach().contiguous()
        for name, tensor in state.items()
    }


_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)
_HALVES = (torch.float16, torch.bfloat16)


def cast_map(program: ExportedProgram) -> list[Cast]:
    """Every cast between floating types that the program does at a run, the most bytes first.

    Bytes are those of a run of the batch that the program was exported with (at another batch they grow together).
    Where memory limits a device, they are proportional to its time; they are counted, not measured.
    """
    casts = []
    for name, node in walk(program.graph_module):
        if (pair := _cast(node)) is not None:
            source, result = pair
            prefix = name.removesuffix(node.name)
            readers = tuple(prefix + reader.name for reader in node.users)
            moved = _elements(source) * (source.element_size() + result.element_size())
            first = node.args[0]
            assert isinstance(first, Node)
            before, after = (str(tensor.dtype).removeprefix("torch.") for tensor in pair)
            casts.append(Cast(prefix + first.name, before, after, moved, readers))
    return sorted(casts, key=lambda cast: -cast.bytes)


def saved_bytes(program: ExportedProgram) -> int:
    """Bytes that the program's half tensors save against FP32 ones, per run: two per element read or written.

    A tensor is written once and read by each of its readers; views neither read nor write; casts, which FP32
    would not have, save nothing.
    """
    saved = 0
    for _, node in walk(program.graph_module):
        if isinstance(node.target, OpOverload) and _cast(node) is None and not aliased(node, written=False):
            saved += sum(2 * _elements(tensor) for tensor in _halves(node))
            saved += sum(
                2 * _elements(tensor) for parent in node.all_input_nodes for tensor in _halves(parent)
            )
    return saved


def _cast(node: Node) -> tuple[Tensor, Tensor] | None:
    """Source and result of a cast from one floating type to another."""
    if node.target not in _CASTS or not isinstance(node.args[0], Node):
        return None
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.dtype == result.dtype:
        return None
    return (source, result) if source.is_floating_point() and result.is_floating_point() else None


def _halves(node: Node) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_of(node.meta.get("val")) if tensor.dtype in _HALVES)


def _elements(tensor: Tensor) -> int:
    """The number of elements at the sizes of the export; a size that depends on data counts as 1."""
    return math.prod(size if isinstance(size, int) else int(size.node.hint or 1) for size in tensor.shape)


@dataclass(frozen=True)
class ProgramOriginal:
    """A captured FP32 program whose run can be changed at a node (`graph.original_graph.OriginalGraph`). ``module`` is
    prepared (`models.program.runnable`)."""

    module: GraphModule
    spec: ModelSpec
    bounds: Bounds | None = None

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.module)

    def makers(self) -> dict[str, str]:
        return makers_of(self.module, self.spec)

    def watched(self, inputs: Arrays, visit: Visit) -> Arrays:
        def seen(run: Interpreter, node: Node, result: Tensor) -> None:
            def rest(changed: np.ndarray) -> Arrays:
                tensor = torch.from_numpy(np.array(changed)).to(result.dtype).reshape(result.shape)
                with held(self.bounds):
                    rest = rest_of_run(self.module, run, self._tensors(inputs), node, tensor)
                return self._named(rest)

            if result.is_floating_point():
                visit(node.name, floats_of(result), rest)

        with torch.inference_mode():
            return self._named(Watched(self.module, seen).run(*self._tensors(inputs)))

    def as_served(self, observe: Observe) -> Answers:
        def seen(run: Interpreter, node: Node, result: Tensor) -> None:
            if result.is_floating_point():
                observe(node.name, floats_of(result))

        return within(self.bounds, emulated(self.spec, Watched(self.module, seen)))

    def otherwise(self, observe: Observe) -> Answers:
        return within(self.bounds, emulated(self.spec, InDouble(self.module, observe=observe)))

    def _tensors(self, inputs: Arrays) -> list[Tensor]:
        return [to_torch(inputs[tensor.name].copy()) for tensor in self.spec.inputs]

    def _named(self, outputs: Sequence[Tensor]) -> Arrays:
        answers = zip(self.spec.outputs, outputs, strict=True)
        return {tensor.name: to_numpy(answer.to(tensor.type.torch)) for tensor, answer in answers}


def captured_subject(
    asked: ModelFolder,
    samples: Samples,
    origin: Mapping[str, Any],
    forms: tuple[str, ...],
    search: bool | None,
    device: str,
) -> tuple[Subject, ProgramForms]:
    """The captured program with its forms. Only the capture finds the size of a table, which the generated samples may
    exceed. Raises as `capture` does."""
    captured = with_smaller_integers(
        asked.spec, samples, lambda tried, _: capture(asked, tried.arrays), CaptureFailed
    )
    subject = Subject(
        program=captured.program,
        spec=captured.spec,
        samples=in_range(samples, asked.spec, captured.spec),
        precision=asked.precision,
        forms=forms,
        source=asked.guessed or asked.folder,
        origin={**origin, "imported": dict(captured.imported)},
        notes=(*asked.notes, *captured.notes),
        search=search,
        device=device,
    )
    return subject, ProgramForms(subject)
