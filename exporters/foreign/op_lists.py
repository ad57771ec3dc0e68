"""The lists of torch.autocast, said of ONNX's ops.

Source: `exporters/autocast/policy.py` (torch 2.13's CUDA registry), op by op of what torch's ONNX exporters write for
each torch op; ONNX's own ops that torch has no counterpart for stand with their nearest relative.
"""

from enum import Enum

from onnx import NodeProto

from ...models.package import Precision
from .graph import BODIES, FLOAT, ONNX, ForeignProgram, attribute


class Rule(Enum):
    """What a node computes in. Constants, and what is computed of nothing else, never decide."""

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


LOWER = ops("MatMul Gemm Conv ConvTranspose DeformConv Einsum LSTM GRU RNN PRelu Attention")
FP32 = ops("""
    Acos Acosh Asin Asinh Atanh Cosh Sinh Tan Exp Log Reciprocal Pow Softplus
    LayerNormalization GroupNormalization InstanceNormalization RMSNormalization MeanVarianceNormalization
    LpNormalization LRN Softmax LogSoftmax SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss
    ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp CumSum CumProd
    Resize Upsample AffineGrid
""")
NORMALISATION = ops("""
    BatchNormalization LayerNormalization GroupNormalization InstanceNormalization RMSNormalization
    MeanVarianceNormalization LpNormalization LRN
""")
# Ranges, selections and boxes are exact or large; quantised, random and spectral ops have no half to speak of.
LEFT_ALONE = ops("""
    Range TopK NonMaxSuppression RoiAlign MaxRoiPool Unique
    QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul MatMulInteger ConvInteger
    RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial
    DFT STFT MelWeightMatrix HannWindow HammingWindow BlackmanWindow CastLike Det ImageDecoder Adagrad Adam
    Momentum Gradient TfIdfVectorizer
""")
# Exact on what they choose, or FP32 inside: where all is to be half the search decides.
HALF_AT_O3 = ops("TopK DFT")
HALF_IS_INF = 20  # the first opset whose IsInf takes a half
AS_IS = ops("Shape Size IsNaN IsInf")
# Slots that stay FP32 although the schema would take a half there: scales, regions, probabilities.
FP32_SLOTS = {"Resize": {1, 2}, "Upsample": {1}, "Dropout": {1}, "GridSample": {1}}

# Slots whose value is only added to something.
ADDED_SLOTS = {
    "Add": {0, 1}, "Sub": {0, 1}, "Sum": set(range(64)), "Gemm": {2}, "Conv": {2}, "ConvTranspose": {2},
    "LSTM": {3}, "GRU": {3}, "RNN": {3}, "LayerNormalization": {2}, "GroupNormalization": {2},
    "InstanceNormalization": {2}, "BatchNormalization": {2, 3},
}  # fmt: skip


def rules(program: ForeignProgram, precision: Precision) -> dict[str, Rule]:
    """Node name → rule, for every node that is no control flow."""
    return {
        node.name: _rule(node, program, precision) for node in program.nodes if node.op_type not in BODIES
    }


def _rule(node: NodeProto, program: ForeignProgram, precision: Precision) -> Rule:
    op, level = node.op_type, precision.level
    if level == "O0" or node.name in program.islands:
        return Rule.ISLAND if level != "O0" else Rule.FP32
    if node.domain not in ONNX or (op in LEFT_ALONE and not (level == "O3" and op in HALF_AT_O3)):
        return Rule.LEFT_ALONE
    if op == "Cast":
        return _cast_rule(node, program)
    if op == "IsInf" and program.opset < HALF_IS_INF:
        return Rule.LEFT_ALONE
    if op in AS_IS:
        return Rule.AS_IS
    if op == "Gather" and _is_embedding(node, program):
        return Rule.HALF if precision.embeddings == "half" or level in ("O2", "O3") else Rule.ISLAND
    if op in LOWER:
        return Rule.HALF
    if level == "O1":
        return Rule.FP32 if op in FP32 else Rule.FOLLOW
    return Rule.FP32_BACK if level == "O2" and op in NORMALISATION else Rule.HALF_IF_FED


def _cast_rule(node: NodeProto, program: ForeignProgram) -> Rule:
    if node.name in program.halved:
        return Rule.HALF
    if attribute(node, "to") == FLOAT and program.is_float(node.input[0]):
        return Rule.ISLAND  # a .float() that the file says of a float
    return Rule.AS_IS


def _is_embedding(node: NodeProto, program: ForeignProgram) -> bool:
    table = program.weights.get(node.input[0])
    return (
        table is not None
        and program.is_float(node.input[0])
        and table.ndim >= 2
        and node.input[1] not in program.weights
    )
