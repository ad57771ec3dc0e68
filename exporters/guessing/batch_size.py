"""How many rows a batch may have before its largest value needs more memory than is reasonable to ask for."""

import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import ModelProto

from ...models.spec import ModelSpec

# Of the largest value in a batch. A conversion was seen to need twelve times as much.
BATCH_BYTES = 1 << 28
_FP32_BYTES = 4


def fitting_rows(model: ModelProto, spec: ModelSpec, inputs: Mapping[str, Sequence[int]]) -> int:
    """The largest power of two up to ``spec.max_batch_size`` with which no value has more than `BATCH_BYTES`.

    ``inputs``: the shape of each input for one row, as the file has it. Sizes that shape inference does not find count
    as 1. Source: onnx.shape_inference.
    """
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs.get(value.name, ()), strict=False):
            dim.dim_value = size
    try:
        graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError):  # ValueError: above protobuf's 2 GiB
        return spec.max_batch_size
    sizes = [
        math.prod(dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.output)
    ]
    fitting = max(BATCH_BYTES // (_FP32_BYTES * max(sizes, default=1)), 1)
    return min(spec.max_batch_size, 1 << (fitting.bit_length() - 1))
