"""Foreign ONNX files for tests, written in ONNX's own text form, and their conversion.

from tests.exporters.foreign.onnx_files import convert, errors_u, parsed
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from halfeven.exporters.foreign.conversion import (
    ForeignHalf,
    convert_onnx,
    half_answers,
    oracle_answers,
    whole_answers,
)
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.datatypes import name_of
from halfeven.models.package import ModelFolder, Precision
from halfeven.models.spec import Dim, ModelSpec, TensorSpec
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
    """What model.toml would say of the graph's own inputs and outputs."""
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


def convert(
    path: Path,
    model: ModelProto,
    samples: Arrays,
    level: str = "O1",
    dtype: str = "fp16",
    keep: Sequence[str] = (),
    embeddings: str = "keep",
    max_batch_size: int = 8,
) -> ForeignHalf:
    folder = saved(path, model, spec_of(model, max_batch_size))
    precision = Precision(level, dtype, tuple(keep), embeddings)
    return convert_onnx(path / "model.onnx", folder, Samples(dict(samples)), precision)


def errors_u(foreign: ForeignHalf, *batches: Arrays) -> dict[str, float]:
    """The half on fresh inputs against its whole: the worst of oracle and runtime, in u of the largest |R|.

    As the gate has it: the largest |R| is that over all batches; integers and booleans must be equal (else inf),
    and so must the masks of what is not finite.
    """
    references = [whole_answers(foreign)(inputs) for inputs in batches]
    worst: dict[str, float] = {}
    for answers in (oracle_answers(foreign), half_answers(foreign)):
        came = [answers(inputs) for inputs in batches]
        for name in references[0]:
            pairs = [(one[name], other[name]) for one, other in zip(references, came, strict=True)]
            worst[name] = max(worst.get(name, 0.0), gap_u(pairs, U[foreign.precision.dtype]))
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
