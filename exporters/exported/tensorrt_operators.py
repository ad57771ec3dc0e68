"""Operations that TensorRT does not have, rewritten in an ONNX file as operations that it has.

Of a DFT, and of a ScatterElements or ScatterND that adds. The datatypes of all other values stay as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto
from onnx_ir.convenience import get_const_tensor
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from ...models.errors import ExportFailed, OrderEnded
from ...models.files.json_fields import JsonFields
from ..inputs.samples import Samples
from ..onnx.reading.bounded_file import read_graph, read_model
from ..onnx.reading.graph import BODIES, ONNX, Names, names_in, opset_of
from ..onnx.reading.large_files import remove_onnx, save
from ..onnx.runtime import session_of
from ..torch.onnx_form.check import check_file
from .new_nodes import FLOATS, HALVES, NewNodes, wide
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
class LackingOperation(JsonFields):
    """An operation of a file that TensorRT lacks; its ``output`` is named. ``left_because``: why it stays as it is,
    empty where it is rewritten."""

    output: str
    operation: str
    left_because: str = ""


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


LARGEST_MATRIX = 1 << 24  # elements: 64 MiB in FP32


def fourier_product(new: NewNodes, node: ir.Node, opset: int) -> ir.Value | str:
    """The value that takes the place of a DFT's output, or the reason why there is none: one product with a constant
    matrix.

    A line of N numbers along the axis, real or complex, is a row of N · C numbers. The transform is linear in them, so
    it is a product with a matrix [N · C, K · P] of cosines and sines: K numbers come out, of P parts (1 real, 2
    complex). The matrix is computed in FP64. Source: the operators DFT-17 and DFT-20 of the ONNX specification.

    It has the datatype of the input; the product of a half input is computed in FP32.
    """
    x = node.inputs[0]
    assert x is not None
    shape, dtype = x.shape, x.dtype
    if shape is None or dtype is None or dtype not in FLOATS:
        return "the shape and type of its input are not known"
    rank, parts, axis, length = len(shape), shape[-1], _axis(node, opset), _integer(node, 1, 0)
    if axis is None or (parts != 1 and parts != 2):
        return "its axis, or whether its input is real or complex, is not a constant"
    axis %= rank
    inverse, onesided = (node.attributes.get_int(name, 0) == 1 for name in ("inverse", "onesided"))
    found = shape[axis]
    if not isinstance(found, int) or not isinstance(parts, int) or length is None:
        return "its length is not a constant"
    if onesided and parts != (2 if inverse else 1):
        return "a onesided transform takes real numbers forward and complex ones back"
    length = length or (2 * (found - 1) if inverse and onesided else found)
    if inverse and onesided and found != length // 2 + 1:
        # ONNX's reference implementation cuts or fills up the spectrum, ONNX Runtime 1.31 answers otherwise
        return f"its spectrum has {found} numbers, where a length of {length} has {length // 2 + 1}"
    read = min(found, length)
    if (size := read * parts * length * 2) > LARGEST_MATRIX:
        return f"its matrix would have up to {size} elements, more than {LARGEST_MATRIX}"
    if read < found:
        x = new.op("Slice", x, new.integers(0), new.integers(read), new.integers(axis))
    matrix = fourier_matrix(length, read, parts, inverse, onesided).astype(wide(dtype).numpy())
    came = _along(new, new.cast(x, wide(dtype)), rank, axis, matrix)
    return new.cast(came, dtype) if dtype in HALVES else came


def fourier_matrix(length: int, read: int, parts: int, inverse: bool, onesided: bool) -> np.ndarray:
    """FP64 [read, parts, K, P]: what the number at each place read adds to each number that comes out.

    Numbers beyond ``read`` are zero. Inverse and onesided: the numbers read are the first half of a spectrum, whose
    second half is their conjugate, and what comes out is real.
    """
    count = length if inverse or not onesided else length // 2 + 1
    places = np.outer(np.arange(read), np.arange(count)) % length
    angle = (1 if inverse else -1) * 2.0 * np.pi * places / length
    quarters = places * 4 % length == 0  # there both are 0, 1 or −1, which FP64 misses by its rounding of π
    cos, sin = (np.where(quarters, np.round(exact), exact) for exact in (np.cos(angle), np.sin(angle)))
    matrix = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], 1)[:, :parts]
    if inverse:
        matrix /= length
    if inverse and onesided:
        own = np.arange(read) * 2 % length == 0  # their conjugate is themselves
        matrix = matrix[..., :1] * np.where(own, 1.0, 2.0)[:, None, None, None]
    return matrix


def _along(new: NewNodes, x: ir.Value, rank: int, axis: int, matrix: np.ndarray) -> ir.Value:
    """The product of the lines along ``axis`` of x [..., N, ..., C] with the matrix [N, C, K, P]: [..., K, ..., P]."""
    read, parts, count, made = matrix.shape
    order = [*(place for place in range(rank - 1) if place != axis), axis, rank - 1]
    kept = [0] * (rank - 2)  # a size of 0 keeps the input's
    rows = new.op("Reshape", new.op("Transpose", x, perm=order), new.integers(*kept, read * parts))
    flat = new.constant(np.ascontiguousarray(matrix.reshape(read * parts, count * made)))
    lines = new.op("Reshape", new.op("MatMul", rows, flat), new.integers(*kept, count, made))
    return new.op("Transpose", lines, perm=[order.index(place) for place in range(rank)])


def _axis(node: ir.Node, opset: int) -> int | None:
    """The axis of a DFT; None where the graph computes it. Below opset 20 it is an attribute, 1 unless given."""
    if opset < 20:
        return node.attributes.get_int("axis", 1)
    return _integer(node, 2, -2)


def _integer(node: ir.Node, slot: int, default: int) -> int | None:
    """The number in the node's input at ``slot``; ``default`` where there is no such input, None where the graph
    computes it."""
    value = node.inputs[slot] if len(node.inputs) > slot else None
    if value is None:
        return default
    constant = get_const_tensor(value)
    return None if constant is None else int(constant.numpy().reshape(-1)[0])
