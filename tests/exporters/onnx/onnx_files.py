"""Foreign ONNX files for tests, written in ONNX's own text form, and their conversion.

from tests.exporters.onnx.onnx_files import convert, errors_u, parsed
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from halfeven.exporters.graph.actions import Kept
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.conversion import ForeignHalf
from halfeven.exporters.onnx.forms import FileForms, foreign_subject
from halfeven.exporters.onnx.precision.file_graph import FileGraph
from halfeven.exporters.onnx.reading.graph import ForeignProgram
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.exporters.plan.aims import SHARES
from halfeven.exporters.plan.planner import Planner
from halfeven.exporters.proof.prove import Answers
from halfeven.exporters.proof.threads import fixed_threads
from halfeven.exporters.search.delta_debugging import Found
from halfeven.models.folder.package import ModelFolder, Precision
from halfeven.models.spec.datatypes import name_of
from halfeven.models.spec.spec import Dim, ModelSpec, ParityLimits, TensorSpec
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

Arrays = Mapping[str, np.ndarray]
U = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def parsed(text: str, weights: Arrays | None = None, opset: int = 17, more: str = "") -> ModelProto:
    """``text`` is a graph (and functions); ``weights`` become initialisers; ``more``: further opset imports."""
    imports = f'"" : {opset}{more}'
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> {text}")
    for name, array in (weights or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def spec_of(model: ModelProto, max_batch_size: int = 8) -> ModelSpec:
    """The signature that model.toml would state for the graph's own inputs and outputs."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return ModelSpec(
        "foreign",
        tuple(_tensor(value) for value in model.graph.input if value.name not in constants),
        tuple(_tensor(value) for value in model.graph.output),
        max_batch_size=max_batch_size,
    )


def _tensor(value: ValueInfoProto) -> TensorSpec:
    type_ = value.type.tensor_type
    shape = tuple(
        Dim(d.dim_value, d.dim_value) if d.HasField("dim_value") else Dim() for d in type_.shape.dim
    )
    return TensorSpec(value.name, name_of(helper.tensor_dtype_to_np_dtype(type_.elem_type)), shape)


def saved(path: Path, model: ModelProto, spec: ModelSpec | None = None) -> ModelFolder:
    path.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path / "model.onnx")
    return ModelFolder(path, "model.onnx", (), None, None, spec or spec_of(model), Precision())


@dataclass(frozen=True, slots=True)
class ConvertedFile:
    """A file planned on samples, as the road plans it first; nothing is judged or published."""

    maker: FileForms

    @property
    def spec(self) -> ModelSpec:
        return self.maker.subject.spec

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.maker.subject.notes, *(str(repair["what"]) for repair in self.maker.settled.repairs))

    @property
    def planner(self) -> Planner[FileGraph]:
        assert self.maker.planner is not None
        return self.maker.planner

    @property
    def found(self) -> Found | None:
        return self.planner.plan.found

    @property
    def written(self) -> ForeignHalf:
        return self.maker.half

    @property
    def program(self) -> ForeignProgram:
        return self.written.program

    @property
    def kept(self) -> tuple[Kept, ...]:
        return tuple(self.written.kept)

    @property
    def half_nodes(self) -> int:
        return self.written.half_nodes

    @property
    def original(self) -> ModelProto:
        return self.written.original

    @property
    def half(self) -> ModelProto | None:
        return self.written.half

    def original_answers(self) -> Answers:
        return self.maker.answers

    def half_answers(self) -> Answers:
        """The half as ONNX Runtime's CPU runs it."""
        half = self.half
        return runtime_answers(self.original if half is None else half)

    def oracle_answers(self, floor: bool = False) -> Answers:
        """The half with true half storage."""
        return self.maker.settled.half(floor=floor)


def convert_file(folder: ModelFolder, samples: Samples, precision: Precision) -> ConvertedFile:
    """``samples`` plan; at O3 they are searched with, too."""
    asked = replace(folder, precision=precision)
    _, maker = foreign_subject(asked, samples, {}, True, lambda _: None)
    assert isinstance(maker, FileForms)
    with fixed_threads(maker.row_operations):
        maker.plan(samples, SHARES[0], lambda _: None)
    return ConvertedFile(maker)


def convert(
    path: Path,
    model: ModelProto,
    samples: Arrays,
    level: str = "O1",
    dtype: str = "fp16",
    keep: Sequence[str] = (),
    embeddings: str = "keep",
    max_batch_size: int = 8,
    max_error_u: float = 4.0,
) -> ConvertedFile:
    spec = replace(spec_of(model, max_batch_size), parity=ParityLimits(max_error_u=max_error_u))
    folder = saved(path, model, spec)
    return convert_file(folder, Samples(dict(samples)), Precision(level, dtype, tuple(keep), embeddings))


def errors_u(foreign: ConvertedFile, *batches: Arrays) -> dict[str, float]:
    """The half on fresh inputs against its original: the worst of oracle and runtime, in u of the largest |R|.

    As the gate has it: the largest |R| is that over all batches; integers and booleans must be equal (else inf),
    and so must the masks of what is not finite.
    """
    references = [foreign.original_answers()(inputs) for inputs in batches]
    worst: dict[str, float] = {}
    for answers in (foreign.oracle_answers(), foreign.half_answers()):
        came = [answers(inputs) for inputs in batches]
        for name in references[0]:
            pairs = [(one[name], other[name]) for one, other in zip(references, came, strict=True)]
            worst[name] = max(worst.get(name, 0.0), gap_u(pairs, U[foreign.maker.settled.precision.dtype]))
    return worst


def gap_u(pairs: Sequence[tuple[np.ndarray, np.ndarray]], u: float) -> float:
    """The largest error of (expected, came) in units of u times the largest expected magnitude."""
    error, scale = 0.0, 0.0
    for expected, came in pairs:
        assert (came.dtype, came.shape) == (expected.dtype, expected.shape)
        one, other = expected.astype(np.float64), came.astype(np.float64)
        finite = np.isfinite(one)
        if expected.dtype.kind in "biu" and not np.array_equal(expected, came):
            return float("inf")
        if not np.array_equal(
            np.where(finite, np.nan, one), np.where(np.isfinite(other), np.nan, other), equal_nan=True
        ):
            return float("inf")
        error = max(error, float(np.abs(one - other)[finite].max(initial=0.0)))
        scale = max(scale, float(np.abs(one)[finite].max(initial=0.0)))
    return error / (u * (scale or 1.0))


def element_types(model: ModelProto) -> dict[str, int]:
    """Initialiser name → element type."""
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def nodes_of(model: ModelProto, op: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op]
