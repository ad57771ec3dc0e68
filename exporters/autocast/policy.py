"""Which ops run in which precision: the lists of torch.autocast, as data, and the levels above them.

Source: torch 2.13, ``aten/src/ATen/autocast_mode.h`` (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE) for CUDA and ``autocast_mode.cpp`` (TORCH_LIBRARY_IMPL
aten, AutocastCPU) for CPU; the two norm overloads that CUDA gives a dtype argument stand under FP32, which
rounds the same. A name stands for all overloads unless one is given. What is on no list runs in
the dtype of its inputs. Levels are Apex's (``apex.amp`` opt_levels O0 to O3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torch._ops import OpOverload


class Rule(Enum):
    """What autocast does with an op's floating inputs."""

    LOWER = "lower precision"
    FP32 = "FP32"
    FP32_DTYPE = "FP32 by its dtype argument"
    WIDEST = "widest input type"
    BANNED = "banned"
    INPUT = "input type"


def names(text: str) -> frozenset[str]:
    """A set of words that stand in one text."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class OpLists:
    """One device's autocast registry. ``name.overload`` entries win over ``name`` entries."""

    device: str
    lower: frozenset[str]
    fp32: frozenset[str]
    fp32_dtype: frozenset[str]
    widest: frozenset[str]
    banned: frozenset[str]

    def rule(self, op: OpOverload) -> Rule:
        name = op._schema.name.removeprefix("aten::")
        for key in (f"{name}.{op._overloadname}", name):
            for rule, entries in (
                (Rule.LOWER, self.lower),
                (Rule.FP32, self.fp32),
                (Rule.FP32_DTYPE, self.fp32_dtype),
                (Rule.WIDEST, self.widest),
                (Rule.BANNED, self.banned),
            ):
                if key in entries:
                    return rule
        return Rule.INPUT


CUDA = OpLists(
    device="cuda",
    lower=names("""
        _convolution _convolution.deprecated convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr
        matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        scaled_dot_product_attention _scaled_dot_product_flash_attention
    """),
    fp32=names("""
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
        poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
        mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
        _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
        upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """),
    fp32_dtype=names("""
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList
    """),
    widest=names("""
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """),
    banned=names("binary_cross_entropy"),
)

CPU = OpLists(
    device="cpu",
    lower=names("""
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding _convolution.deprecated conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input mm bmm addmm addbmm baddbmm
        _addmm_activation matmul linear linalg_vecdot prelu mkldnn_rnn_layer scaled_dot_product_attention
        _native_multi_head_attention
    """),
    fp32=names("""
        avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d max_unpool2d max_unpool3d
        fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d grid_sampler grid_sampler_2d grid_sampler_3d
        _grid_sampler_2d_cpu_fallback binary_cross_entropy mse_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss
        margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div
        multilabel_margin_loss multilabel_margin_loss_forward
        binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn
        fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft stft polar
        view_as_complex prod quantile nanquantile cdist trace fake_quantize_per_tensor_affine cholesky
        cholesky_inverse cholesky_solve inverse pinverse lu_solve _lu_with_info qr svd geqrf orgqr ormqr
        triangular_solve linalg_cond linalg_matrix_rank linalg_solve linalg_cholesky linalg_cholesky_ex
        linalg_svd linalg_svdvals linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv
        linalg_inv_ex linalg_householder_product linalg_tensorinv linalg_tensorsolve linalg_qr linalg_lstsq
    """),
    fp32_dtype=frozenset(),
    widest=names("stack cat index_copy"),
    banned=frozenset(),
)

LISTS: Mapping[str, OpLists] = {"cuda": CUDA, "cpu": CPU}

# O2 keeps these in FP32 and gives their result back in half, as Apex's keep_batchnorm_fp32 does.
NORMALISATION = names(
    "batch_norm native_batch_norm _native_batch_norm_legit_no_training layer_norm native_layer_norm group_norm "
    "native_group_norm instance_norm rms_norm"
)
EMBEDDINGS = names("embedding embedding_bag")
# Loops over time in one op. Autocast acts inside them, where a plan cannot look, and a CPU has no FP16 kernel
# for all of them (oneDNN's LSTM): FP32 at every level.
RECURRENT = names("lstm gru rnn_tanh rnn_relu")
