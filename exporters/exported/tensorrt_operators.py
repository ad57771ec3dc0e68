"""Operations that TensorRT does not have, rewritten in an ONNX file as operations that it has.

Of a DFT, and of a ScatterElements or ScatterND that adds. The datatypes of all other values stay as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from ...models.errors import ExportFailed, OrderEnded
from ..inputs.samples import Samples
from ..onnx.reading.bounded_file import read_graph, read_model
from ..onnx.reading.graph import BODIES, ONNX, Names, names_in, opset_of
from ..onnx.reading.large_files import remove_onnx, save
from ..onnx.runtime import session_of
from ..torch.onnx_form.check import check_file
from .fourier_products import fourier_product
from .new_nodes import NewNodes
from .scattered_sums import Sizes, sum_of_elements, sum_of_slices

SEEN_IN = "TensorRT-RTX 1.7"
# Operations of ONNX for which `OnnxParser.supports_operator` of that library is false.
LACKING = frozenset({
    "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "DeformConv", "Det",
    "DynamicQuantizeLinear", "ImageDecoder", "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix",
    "Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv",
    "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat",
    "StringNormalizer", "StringSplit", "SwiGLU", "TfIdfVectorizer", "Unique",
})  # fmt: skip
_SCATTERS = ("ScatterElements", "ScatterND")  # TensorRT has both without a reduction


@dataclass(frozen=True, slots=True)
class LackingOperation:
    """An operation of a file that TensorRT lacks; its ``output`` is named. ``left_because``: why it stays as it is,
    empty where it is rewritten."""

    output: str
    operation: str
    left_because: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def rewrite_for_tensorrt(path: Path, samples: Samples, most_rows: int) -> list[LackingOperation]:
    """Rewrite the file in place, and give every operation of it that TensorRT lacks, rewritten or not.

    ``samples`` show the sizes of values of no fixed shape, for batches of ``most_rows`` rows (0: not batched). The file
    is not touched where nothing in it is rewritten. Raises ExportFailed where the file that was written is not valid,
    and OrderEnded where its check did not end.
    """
    if not list(_lacking(ir.from_proto(read_graph(path)))):
        return []
    proto = read_model(path, path.parent)
    model = ir.from_proto(proto)
    ShapeInferencePass(check_type=False, strict_mode=False)(model)
    sizes, names = _sizes(model, proto, samples, most_rows), Names(names_in(proto.graph))
    opset = opset_of(proto)
    found = [_rewritten(model, node, opset, names, sizes) for node in list(_lacking(model))]
    if all(operation.left_because for operation in found):
        return found
    RemoveUnusedNodesPass()(model)
    _write(model, path)
    return found


def _lacking(model: ir.Model) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        if node.domain in ONNX and (node.op_type in LACKING or _reduction(node) != "none"):
            yield node


def _reduction(node: ir.Node) -> str:
    return node.attributes.get_string("reduction", "none") if node.op_type in _SCATTERS else "none"


def _rewritten(model: ir.Model, node: ir.Node, opset: int, names: Names, sizes: Sizes) -> LackingOperation:
    new = NewNodes(node, model.graph, names)
    operation = f"{node.op_type} ({_reduction(node)})" if node.op_type in _SCATTERS else node.op_type
    if operation == "DFT":
        came = fourier_product(new, node, opset)
    elif operation == "ScatterElements (add)":
        came = sum_of_elements(new, node, sizes)
    elif operation == "ScatterND (add)":
        came = sum_of_slices(new, node, sizes)
    else:
        came = "halfeven does not rewrite this operation"
    output = node.outputs[0].name or ""
    if isinstance(came, str):
        return LackingOperation(output, operation, came)
    new.put(came)
    return LackingOperation(output, operation)


def _sizes(model: ir.Model, proto: ModelProto, samples: Samples, most_rows: int) -> Sizes:
    """The sizes, in the largest batch, of the values that a ScatterElements or ScatterND reads, by name; without those
    of values in bodies that are not fixed."""
    scatters = [node for node in _lacking(model) if node.op_type in _SCATTERS]
    read = {
        value.name: value for node in scatters for value in node.inputs if value is not None and value.name
    }
    fixed = {
        name: value.shape.numpy()
        for name, value in read.items()
        if value.shape is not None and value.shape.is_static()
    }
    seen = {value.name for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs))}
    free = [name for name in read if name not in fixed and name in seen]
    return {**fixed, **(_measured(proto, free, samples, most_rows) if free else {})}


def _measured(proto: ModelProto, names: Sequence[str], samples: Samples, most_rows: int) -> Sizes:
    """The sizes of these values in the largest batch, extrapolated from a run with one row and a run with two."""
    part = ir.from_proto(proto)
    values = {value.name: value for node in part.graph for value in node.outputs}
    part.graph.outputs[:] = [values[name] for name in names if name in values]
    # The nodes behind these values need not be computed, and some of them have no kernel in half.
    RemoveUnusedNodesPass()(part)
    session = session_of(ir.to_proto(part)) if part.graph.outputs else None
    one = two = _shapes(session, samples, min(most_rows, 1))
    if (more := most_rows - 1) > 0 and samples.count > 1:
        two = _shapes(session, samples, 2)
    return {
        name: [size + more * (other - size) for size, other in zip(one[name], two[name], strict=True)]
        for name in names
    }


def _shapes(
    session: onnxruntime.InferenceSession | None, samples: Samples, rows: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's inputs and of the session's outputs, for the first rows of the samples."""
    _, inputs = next(iter(samples.batches(rows)))
    shapes = {name: array.shape for name, array in inputs.items()}
    if session is not None:
        feed = {value.name: np.asarray(inputs[value.name]) for value in session.get_inputs()}
        asked = [value.name for value in session.get_outputs()]
        came = zip(asked, session.run(asked, feed), strict=True)
        shapes |= {name: np.asarray(array).shape for name, array in came}
    return shapes


def _write(model: ir.Model, path: Path) -> None:
    bodies = any(node.op_type in BODIES for node in model.graph.all_nodes())
    remove_onnx(path)
    try:
        save(ir.to_proto(model), path)
        check_file(path, bodies)
    except OrderEnded:
        raise
    except Exception as error:
        raise ExportFailed(
            f"{path.name} is not valid after its operations that TensorRT lacks were rewritten: {str(error)[:600]}; "
            "export the model for onnxruntime (--for onnxruntime), whose files are not rewritten"
        ) from error
