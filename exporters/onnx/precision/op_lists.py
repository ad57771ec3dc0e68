"""The rules of the table of operation classes (`exporters/policy/classes.py`) for the nodes of an ONNX file.

Rules that depend on the node and not on its class are here: casts of the file itself, embeddings, operand slots.
"""

from enum import Enum

from onnx import NodeProto

from ....models.folder.package import Precision
from ...policy.classes import CLASSES, OTHER, OpClass, Trait, class_of, has
from ...policy.classes import Rule as Lists
from ..reading.graph import BODIES, FLOAT, ONNX, ForeignProgram, attribute
from ..reading.one_node import FUSED


class Rule(Enum):
    """The precision in which a node computes. Constants, and values computed only from them, never decide."""

    HALF = "half"
    FP32 = "fp32"
    FP32_BACK = "fp32, result back to half"
    FOLLOW = "as its widest input"
    HALF_IF_FED = "half, unless it is computed from constants alone"
    LEFT_ALONE = "left alone, in fp32"
    ISLAND = "fp32 by the file's own word"
    AS_IS = "reads what comes"


def ops(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = frozenset().union(  # products: half is worth most there
    *(found.onnx for found in CLASSES if found.o1 is Lists.LOWER or Trait.RECURRENT in found.traits)
)
HALF_IS_INF = 20  # the first opset whose IsInf takes a half
# Slots that stay FP32 although the schema would take a half there: scales, regions, probabilities.
FP32_SLOTS = {"Resize": {1, 2}, "Upsample": {1}, "Dropout": {1}, "GridSample": {1}}


_BY_LISTS = {
    Lists.FP32: Rule.FP32,
    Lists.FP32_DTYPE: Rule.FP32,
    Lists.FP32_BACK: Rule.FP32_BACK,
    Lists.WIDEST: Rule.FOLLOW,
    Lists.INPUT: Rule.FOLLOW,
    Lists.LEFT_ALONE: Rule.LEFT_ALONE,
}


def rules(program: ForeignProgram, precision: Precision) -> dict[str, Rule]:
    """Node name → rule, for every node that is no control flow."""
    return {
        node.name: _rule(node, program, precision) for node in program.nodes if node.op_type not in BODIES
    }


def _rule(node: NodeProto, program: ForeignProgram, precision: Precision) -> Rule:
    if precision.level == "O0" or node.name in program.islands:
        return Rule.ISLAND if precision.level != "O0" else Rule.FP32
    if not _is_known(node) or (node.op_type == "IsInf" and program.opset < HALF_IS_INF):
        return Rule.LEFT_ALONE
    if node.op_type == "Cast":
        return _cast_rule(node, program)
    if has(node.op_type, Trait.SEES_SIZES, Trait.SEES_PRECISION):
        return Rule.AS_IS
    if node.op_type == "Gather" and _is_embedding(node, program):
        return Rule.HALF if class_of("embedding").rule(precision) is Lists.LOWER else Rule.ISLAND
    return _of_class(class_of(node.op_type), precision)


def _is_known(node: NodeProto) -> bool:
    """True if halfeven knows in which precision the operator of this ONNX node may run.

    It does for every operator of ONNX itself, and for those of ONNX Runtime that are in the table of operation classes
    (`exporters/policy/classes.py`)."""
    return node.domain in ONNX or (node.domain == FUSED and class_of(node.op_type) is not OTHER)


def _of_class(found: OpClass, precision: Precision) -> Rule:
    rule = found.rule(precision)
    if Trait.RECURRENT in found.traits and precision.level != "O1":
        return Rule.HALF  # `Kernels.refusal` refuses it: it is kept, and the report says why
    if rule is Lists.LOWER:
        return Rule.HALF if found.o1 is Lists.LOWER else Rule.HALF_IF_FED
    return _BY_LISTS[rule]


def _cast_rule(node: NodeProto, program: ForeignProgram) -> Rule:
    if node.name in program.halved:
        return Rule.HALF
    if attribute(node, "to") == FLOAT and program.is_float(node.input[0]):
        return Rule.ISLAND  # a .float() of a float in the file
    return Rule.AS_IS


def _is_embedding(node: NodeProto, program: ForeignProgram) -> bool:
    table = program.weights.get(node.input[0])
    return (
        table is not None
        and program.is_float(node.input[0])
        and table.ndim >= 2
        and node.input[1] not in program.weights
    )
