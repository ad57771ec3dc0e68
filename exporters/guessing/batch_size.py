"""Finds the number of rows up to which a batch's largest value needs no unreasonable amount of memory."""

import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import ModelProto

from ..onnx.reading.graph import replace_all
from ..onnx.reading.large_files import weights_as_inputs

# The most bytes of the largest value in a batch. A conversion was seen to need twelve times as much.
BATCH_BYTES = 1 << 28
_FP32_BYTES = 4
_LISTS_OF_TREES = ("nodes_", "target_", "class_")


def fitting_rows(row_bytes: int, most: int) -> tuple[int, str]:
    """The largest power of two up to ``most`` with which no value has more than `BATCH_BYTES`, and why it is less
    than ``most`` (empty where it is not).

    ``row_bytes``: of the largest value, for one row.
    """
    fitting = max(BATCH_BYTES // max(row_bytes, 1), 1)
    rows = min(most, 1 << (fitting.bit_length() - 1))
    if rows == most:
        return most, ""
    return (
        rows,
        f"at most {rows}, for a value inside would have more than {BATCH_BYTES >> 20} MiB with {2 * rows}",
    )


def row_bytes_of_file(model: ModelProto, inputs: Mapping[str, Sequence[int]]) -> int:
    """The bytes of the largest value of a graph for one row, in FP32; 0 where shape inference fails.

    ``inputs``: the shape of each input for one row, as the file has it. Sizes that shape inference does not find count
    as 1. Source: onnx.shape_inference.
    """
    fixed = weights_as_inputs(model)
    for node in fixed.graph.node:
        if node.domain == "ai.onnx.ml":  # trees are lists in attributes, which no shape depends on
            kept = [one for one in node.attribute if not one.name.startswith(_LISTS_OF_TREES)]
            replace_all(node.attribute, kept)
    for value in fixed.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs.get(value.name, ()), strict=False):
            dim.dim_value = size
    try:
        graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError):  # ValueError: above protobuf's 2 GiB
        return 0
    sizes = (
        math.prod(dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.output)
    )
    return _FP32_BYTES * max(sizes, default=1)
