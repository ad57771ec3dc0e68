"""Folds values that the ONNX exporter leaves to be computed at every call although they are known beforehand.

torch.onnx cuts the weights of an LSTM into gates by sizes that it looks up in the graph, and computes the scale of an
attention from the width of a head. Known sizes, and values that are cut, joined and computed from constants alone,
become constants here. No operation on a caller's numbers is changed.
"""

import logging
import warnings
from contextlib import suppress

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants

SMALL = 1 << 14  # elements: constants up to this size are made whatever they are made of
_CUTS = frozenset({"Slice", "Concat", "Split", "Unsqueeze", "Squeeze", "Reshape"})
# exact, or rounded as IEEE says, in every library
_EXACT = _CUTS | {
    "Shape", "Size", "Gather", "Transpose", "Expand", "Identity", "Cast", "CastLike", "Add", "Sub", "Mul", "Div",
    "Sqrt", "Neg",
}  # fmt: skip


def fold_known(model: ir.Model) -> None:
    """Fold in place. The answers stay the same, bit for bit; names of inputs and outputs stay."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # onnxscript 0.7 fails at a SplitToSequence into parts of a computed size. What it folded before stays.
            with suppress(RuntimeError):
                fold_constants(model, onnx_shape_inference=True, should_fold=_is_worth_it)
            # sequences that were split up, sizes that no node reads any more
            RemoveUnusedNodesPass()(model)
    finally:
        logger.setLevel(level)


def _is_worth_it(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in _EXACT:
        return False
    large = [value for value in node.inputs if value is not None and _size(value) > SMALL]
    return not large or (node.op_type in _CUTS and all(_is_only_cut(value) for value in large))


def _is_only_cut(value: ir.Value) -> bool:
    """Whether the pieces of a large constant would replace it, not be stored beside it."""
    return all(node.op_type in _CUTS for node, _ in value.uses())


def _size(value: ir.Value) -> int:
    return value.const_value.size if value.const_value is not None else 0
