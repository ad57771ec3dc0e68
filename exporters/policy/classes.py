"""The table of operation classes: names in ATen and in ONNX, the precision at each level, and traits.

Both back ends (captured programs, ONNX files) read their rules here. The rule at O1 is that of torch.autocast.

Sources: torch 2.13, ``aten/src/ATen/autocast_mode.h`` (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE), as registered for CUDA; the two norm overloads to which CUDA gives a
dtype argument stand under FP32, which rounds the same. What an older torch has not on its lists is said in
`exporters/torch/autocast/policy.py`. ONNX names: what torch's ONNX exporter writes for the class, and
by ONNX's operator documentation where torch has no such operation; operators that ONNX Runtime's optimiser makes of
several (``MultiHeadAttention``, ``SkipLayerNormalization``) stand in the class of the one that decides. O2 and O3: Apex
(``apex.amp`` opt_levels).

An ATen name stands for all overloads and for the in-place variant unless an overload is given. An operation in no class
follows its inputs at O1 and is half above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ...models.folder.package import Precision


class Rule(Enum):
    """The precision of an operation's floating inputs at a level."""

    LOWER = "lower precision"
    FP32 = "FP32"
    FP32_DTYPE = "FP32 by its dtype argument"
    FP32_BACK = "FP32, result back to half"
    WIDEST = "widest input type"
    BANNED = "banned"
    INPUT = "input type"
    LEFT_ALONE = "left alone, in FP32"


class Trait(Enum):
    """A property of an operation that some decision depends on."""

    MOVES = "op(round(x)) is round(op(x)), bit for bit: values are placed elsewhere or change their sign"
    SELECTS = "the same but for the sign of a zero: one of the values is picked by its order"
    COPIES = "every element of the result is an element of the first input"
    FLOORS = "elements are lifted to a bound, or to a second input"
    COMPARES = "two inputs are compared"
    SEES_SIZES = "the sizes of the input are read, not its elements"
    SEES_PRECISION = "the result says whether an element is finite"
    SOFTMAX = "exponentials over their sum"
    ATTENTION = "fused: product, softmax, product"
    EMBEDDING = "rows of a table by index"
    NORMALISES = "statistics are taken out; O2 keeps it in FP32"
    RECURRENT = "a loop over time in one operation"
    PRODUCT = "a matrix product, contracted over the last axis of its left operand"
    REDUCES = "sums over many elements"
    EXPONENTIAL = "an absolute error of a large argument becomes a relative one"
    PERIODIC = "a large argument loses its angle"
    ADDS = "a sum or a difference of two inputs"
    DIVIDES = "by its second input"
    ROOT = "infinite, or infinitely steep, at zero"
    SIGNED_ZERO = "answers otherwise for -0 than for +0"
    NOT_FOLDED = "random or quantised: never computed ahead"


@dataclass(frozen=True, slots=True)
class OpClass:
    """``o1``, ``o2``, ``o3``: the rule at each level. ``traits``: of every operation in the class."""

    name: str
    aten: frozenset[str]
    onnx: frozenset[str]
    o1: Rule
    o2: Rule
    o3: Rule
    traits: frozenset[Trait]

    def rule(self, precision: Precision) -> Rule:
        """The rule of the class at this level; at O0 operations are not changed."""
        if precision.level == "O1" and Trait.EMBEDDING in self.traits and precision.embeddings == "half":
            return Rule.LOWER
        return {"O0": Rule.INPUT, "O1": self.o1, "O2": self.o2, "O3": self.o3}[precision.level]


def _class(
    name: str, aten: str, onnx: str, o1: Rule, *traits: Trait, o2: Rule = Rule.LOWER, o3: Rule = Rule.LOWER
) -> OpClass:
    if Trait.NORMALISES in traits:
        o2 = Rule.FP32_BACK
    return OpClass(name, frozenset(aten.split()), frozenset(onnx.split()), o1, o2, o3, frozenset(traits))


def _fixed(name: str, aten: str, onnx: str, rule: Rule, *traits: Trait) -> OpClass:
    """A class with the same rule at O1, O2 and O3."""
    return _class(name, aten, onnx, rule, *traits, o2=rule, o3=rule)


_LOWER, _FP32, _DTYPE, _WIDEST, _INPUT = Rule.LOWER, Rule.FP32, Rule.FP32_DTYPE, Rule.WIDEST, Rule.INPUT
_T = Trait

# fmt: off
CLASSES: tuple[OpClass, ...] = (
    # AT_FORALL_LOWER_PRECISION_FP: products.
    _class("matrix product", "mm matmul linear bmm mv", "MatMul Gemm", _LOWER, _T.PRODUCT),
    _class("product and sum", "addmm baddbmm addmv addbmm", "", _LOWER, _T.PRODUCT),
    _class("other product", "addr einsum chain_matmul linalg_multi_dot linalg_vecdot conv_tbc",
        "Einsum FusedMatMul FusedGemm GemmFastGelu", _LOWER),
    _class("convolution",
        """conv1d conv2d conv3d convolution _convolution _convolution.deprecated cudnn_convolution""",
        "Conv DeformConv FusedConv NhwcFusedConv NhwcConv", _LOWER),
    _class("transposed convolution", "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose",
        "ConvTranspose", _LOWER),
    _class("attention", "scaled_dot_product_attention _scaled_dot_product_flash_attention",
        "Attention MultiHeadAttention GroupQueryAttention DecoderMaskedMultiHeadAttention", _LOWER, _T.ATTENTION),
    _class("recurrent cell",
        """_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""",
        "", _LOWER),
    _class("parametric ReLU", "prelu", "PRelu", _LOWER),
    # Autocast acts inside them, where a plan cannot look, and neither torch's CPU kernels (oneDNN) nor ONNX Runtime's
    # compute all of them in half.
    _fixed("recurrent layer", "lstm gru rnn_tanh rnn_relu", "LSTM GRU RNN", _FP32, _T.RECURRENT),
    # AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE: wide ranges and long sums.
    _class("exponential", "exp expm1", "Exp", _FP32, _T.EXPONENTIAL),
    _class("logarithm", "log log10 log2", "Log", _FP32, _T.ROOT),
    _class("logarithm of 1 + x", "log1p", "", _FP32),
    _class("reciprocal", "reciprocal rsqrt", "Reciprocal", _FP32, _T.ROOT, _T.SIGNED_ZERO),
    _class("power", "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", "Pow", _FP32, _T.SIGNED_ZERO),
    _class("hyperbolic", "cosh sinh", "Cosh Sinh", _FP32),
    _class("inverse", "acos asin erfinv", "Acos Asin", _FP32),
    _class("tangent", "tan", "Tan", _FP32, _T.PERIODIC),
    _class("softplus", "softplus", "Softplus", _FP32),
    _class("softmax", "softmax.int", "Softmax BiasSoftmax", _DTYPE, _T.SOFTMAX, _T.REDUCES, _T.EXPONENTIAL),
    _class("log softmax", "log_softmax.int", "LogSoftmax", _DTYPE, _T.REDUCES, _T.EXPONENTIAL),
    _class("log of summed exponentials", "logsumexp",
        "ReduceLogSum ReduceLogSumExp", _FP32, _T.REDUCES, _T.EXPONENTIAL),
    _class("layer normalisation", "layer_norm native_layer_norm rms_norm",
        """LayerNormalization RMSNormalization MeanVarianceNormalization LpNormalization LRN SkipLayerNormalization
        SkipSimplifiedLayerNormalization EmbedLayerNormalization""",
        _FP32, _T.NORMALISES, _T.REDUCES),
    # InstanceNormalization is what torch's exporter writes for group_norm where the opset has no GroupNormalization.
    _class("group normalisation", "group_norm",
        "GroupNormalization InstanceNormalization GroupNorm SkipGroupNorm", _FP32, _T.NORMALISES, _T.REDUCES),
    _class("sum", "sum sum.dim_IntList", "ReduceSum", _DTYPE, _T.REDUCES),
    _class("product of elements", "prod prod.dim_int cumprod cumsum",
        "ReduceProd CumProd CumSum", _DTYPE, _T.REDUCES),
    _class("vector norm", "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord",
        "ReduceL1 ReduceL2 ReduceSumSquare", _DTYPE, _T.REDUCES),
    _class("norm of a given order",
        """norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm nuclear_norm.dim renorm""",
        "", _FP32, _T.REDUCES),
    _class("distance", "cosine_similarity dist pdist cdist", "", _FP32),
    _class("loss",
        """poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits""",
        "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss", _FP32),
    _fixed("loss without a half", "binary_cross_entropy", "", Rule.BANNED),
    _class("upsampling to the nearest",
        """upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d""",
        "", _FP32, _T.MOVES),
    _class("upsampling",
        """upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa""",
        "Resize Upsample", _FP32),
    # AT_FORALL_PROMOTE.
    _class("dot product", "dot vdot", "", _WIDEST, _T.PRODUCT),
    _class("sum of products", "addcdiv addcmul bilinear cross tensordot", "", _WIDEST),
    _class("angle of two", "atan2", "", _WIDEST, _T.SIGNED_ZERO),
    _class("sampling on a grid", "grid_sampler", "GridSample", _WIDEST),
    _class("scatter by index", "index_put", "ScatterND", _WIDEST),
    _class("scatter", "scatter_add", "ScatterElements Scatter", _WIDEST),
    # The scatters that are on no list of autocast: they follow their inputs at O1.
    _class("other scatter", "scatter_reduce index_add index_reduce put scatter", "", _INPUT),
    _class("embedding", "embedding", "", _INPUT, _T.EMBEDDING, _T.MOVES, _T.COPIES),
    _class("sum of embeddings", "embedding_bag", "", _INPUT, _T.EMBEDDING),
    _class("batch normalisation", "batch_norm native_batch_norm _native_batch_norm_legit_no_training instance_norm",
        "BatchNormalization", _INPUT, _T.NORMALISES),
    _class("native group normalisation", "native_group_norm", "", _INPUT, _T.NORMALISES, _T.REDUCES),
    _class("native softmax", "_softmax", "", _INPUT, _T.SOFTMAX, _T.REDUCES, _T.EXPONENTIAL),
    _class("statistic", "mean var std var_mean std_mean", "ReduceMean", _INPUT, _T.REDUCES),
    _class("angle", "sin cos", "Sin Cos", _INPUT, _T.PERIODIC),
    _class("root", "sqrt", "Sqrt", _INPUT, _T.ROOT),
    _class("addition", "add sub rsub", "Add Sub Sum", _INPUT, _T.ADDS),
    _class("multiplication", "mul", "Mul", _INPUT),
    _class("activation", "gelu", "Gelu BiasGelu FastGelu QuickGelu BiasSplitGelu BiasAdd", _INPUT),
    _class("rotary embedding", "", "RotaryEmbedding", _INPUT),
    _class("division", "div true_divide divide", "Div", _INPUT, _T.DIVIDES),
    _class("sign of a zero", "arctan2 copysign signbit angle float_power", "", _INPUT, _T.SIGNED_ZERO),
    _class("comparison", "eq ne lt le gt ge", "Equal Less LessOrEqual Greater GreaterOrEqual", _INPUT, _T.COMPARES),
    _class("view",
        """view _unsafe_view reshape view_as reshape_as flatten unflatten squeeze unsqueeze transpose permute t mT
        movedim moveaxis swapaxes swapdims numpy_T expand expand_as broadcast_to slice select narrow diagonal
        split split_with_sizes unsafe_split chunk unsafe_chunk tensor_split unbind unfold contiguous clone alias
        detach ravel""",
        "Identity Reshape Flatten Squeeze Unsqueeze Transpose Expand Slice Split", _INPUT, _T.MOVES, _T.COPIES),
    _class("copy",
        """repeat tile repeat_interleave roll flip rot90 index index_select gather take_along_dim reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle
        channel_shuffle""",
        """Tile Gather GatherElements GatherND DepthToSpace SpaceToDepth Compress ReverseSequence""",
        _INPUT, _T.MOVES, _T.COPIES),
    _class("copy to a type", "to _to_copy type_as lift_fresh_copy", "", _INPUT, _T.COPIES),
    _class("triangle", "tril triu", "Trilu", _INPUT, _T.MOVES),
    _class("join", "cat concat stack hstack vstack", "Concat", _INPUT, _T.MOVES),
    _class("choice", "where masked_fill", "Where", _INPUT, _T.MOVES),
    _class("padding", "constant_pad_nd pad", "Pad", _INPUT, _T.MOVES),
    _class("patches", "im2col select_scatter slice_scatter", "", _INPUT, _T.MOVES),
    _class("sign", "neg abs", "Neg Abs", _INPUT, _T.MOVES),
    _class("floor", "maximum fmax clamp clamp_min", "Max Clip", _INPUT, _T.SELECTS, _T.FLOORS),
    _class("selection", "relu relu6 hardtanh clamp_max amax amin minimum max_pool1d max_pool2d max_pool3d",
        "Relu Min MaxPool GlobalMaxPool ReduceMax ReduceMin", _INPUT, _T.SELECTS),
    _class("sizes", """sym_size zeros_like ones_like empty_like rand_like new_zeros new_ones new_empty full_like""",
        "Shape Size", _INPUT, _T.SEES_SIZES),
    _class("finite or not", "", "IsNaN IsInf", _INPUT, _T.SEES_PRECISION),
    # Ranges and boxes are exact or large; quantised and random operations have no half to speak of.
    _fixed("left alone", "",
        """Range NonMaxSuppression RoiAlign MaxRoiPool Unique MelWeightMatrix HannWindow HammingWindow
        BlackmanWindow CastLike Det ImageDecoder Adagrad Adam Momentum Gradient TfIdfVectorizer""", Rule.LEFT_ALONE),
    _fixed("random or quantised", "",
        """RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial QuantizeLinear
        DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul MatMulInteger ConvInteger""",
        Rule.LEFT_ALONE, _T.NOT_FOLDED),
    _fixed("short-time spectral", "", "STFT", Rule.LEFT_ALONE),
    _class("spectral", "", "DFT", Rule.LEFT_ALONE, o2=Rule.LEFT_ALONE),  # FP32 inside; at O3 the search decides
    _class("dropout", "", "Dropout", _INPUT, _T.NOT_FOLDED),
)
# fmt: on

# The reason why recurrent layers are kept where everything else is half.
NO_HALF_KERNEL = "no half kernel on every device"

_BY_NAME: Mapping[str, OpClass] = {
    name: found
    for found in CLASSES
    for entry in (*found.aten, *found.onnx)
    for name in (entry, entry.partition(".")[0])
}
OTHER = _class("other", "", "", _INPUT)


def class_of(name: str) -> OpClass:
    """The class of an operation by its ONNX name, or its ATen name (``pow``, ``pow.Scalar``, ``add_``)."""
    return _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("_"), OTHER)


def has(name: str, *traits: Trait) -> bool:
    """True if an operation has one of these traits."""
    return not class_of(name).traits.isdisjoint(traits)


def aten_names(rule: Rule) -> frozenset[str]:
    """The ATen entries (``name`` or ``name.overload``) that have a rule at O1."""
    return frozenset().union(*(found.aten for found in CLASSES if found.o1 is rule))
