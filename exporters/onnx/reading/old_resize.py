"""An Upsample, or a Resize of opset 10, counts its places from the corner of a picture. Since opset 11 a Resize counts
from the middle of a pixel unless it says otherwise, which onnx's version converter does not write.

Source: ONNX operators, "Upsample" and "Resize"; for the nearest place ONNX Runtime's kernels of opset 10, which round
down where a picture grows and up where it shrinks.
"""

from collections import ChainMap
from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from .graph import ONNX, graphs, small_constants, walk

NEWEST_OLD = 10  # the last opset with the old meaning
_SCALES = 2  # the place of a Resize's input


def count_from_the_corner(converted: ModelProto) -> None:
    """Write the old meaning into each Resize of a model that was converted from opset 10 or older, in place."""
    scales = ChainMap(*(small_constants(each, (TensorProto.FLOAT,)) for each in graphs(converted.graph)))
    for node in walk(converted.graph):
        if node.op_type == "Resize" and node.domain in ONNX:
            old = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": _rounding(node, scales)}
            kept = [entry for entry in node.attribute if entry.name not in old]
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(key, old[key]) for key in old)])


def _rounding(node: NodeProto, scales: Mapping[str, np.ndarray]) -> str:
    found = scales.get(node.input[_SCALES]) if len(node.input) > _SCALES else None
    return "ceil" if found is not None and (found <= 1).all() else "floor"
