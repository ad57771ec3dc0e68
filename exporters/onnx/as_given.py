"""Compares the FP32 model that was read from an ONNX file (the original) with the file itself, as ONNX Runtime runs it.

Reading a file inlines its functions, converts its opset and computes its constants. A fault of any of these would be in
the original and in the half alike, so that no comparison of those two would show it.
"""

import numpy as np
from onnx import ModelProto

from ...models.batch_axis import array_batch_back, array_batch_first
from ...models.spec import ModelSpec
from ..question import Answers, Arrays
from .reading.bounded_file import tensors
from .reading.graph import HALVES, attribute, walk
from .runtime import runtime_answers

# Of an output's largest number: far above what another order of sums does, below what another operation does.
ALIKE = 1e-3
_HALF = frozenset(HALVES.values())


def difference(given: ModelProto, spec: ModelSpec, original: Answers, row: Arrays) -> str | None:
    """How the original answers the inputs ``row`` otherwise than the file ``given``, as a sentence; None where both answer
    alike.

    Also None where the two cannot be compared: the file has values in half, which the original has in FP32, it is random,
    or ONNX Runtime does not run it as it is.
    """
    if _has_half(given):
        return None
    inputs = {
        tensor.name: np.asarray(array_batch_back(row[tensor.name], tensor.batch_axis), order="C")
        for tensor in spec.inputs
    }
    try:
        answers = runtime_answers(given)
        asked, again = answers(inputs), answers(inputs)
    except Exception:  # ONNX Runtime has no narrower one
        return None
    if not all(_alike(asked[tensor.name], again[tensor.name]) for tensor in spec.outputs):
        return None
    try:
        came = original(row)
    except Exception as error:
        return f"as it is read here it does not run ({str(error)[:200]})"
    for tensor in spec.outputs:
        own = array_batch_first(asked[tensor.name], tensor.batch_axis)
        if not _alike(own, came[tensor.name]):
            return f"as it is read here output '{tensor.name}' is not what ONNX Runtime gives of the file"
    return None


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    numbers, others = one.astype(np.float64), other.astype(np.float64)
    scale = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
    return bool(np.allclose(numbers, others, rtol=0.0, atol=ALIKE * scale, equal_nan=True))


def _has_half(model: ModelProto) -> bool:
    values = (*model.graph.input, *model.graph.output)
    casts = (attribute(node, "to") for node in walk(model.graph) if node.op_type == "Cast")
    types = {value.type.tensor_type.elem_type for value in values} | {t.data_type for t in tensors(model)}
    return not _HALF.isdisjoint(types | set(casts))
