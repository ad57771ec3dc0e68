"""The registries of torch.autocast: CUDA's, whose rules plans follow, and the CPU's, for comparison with live autocast.

Source: CUDA's from the table (`exporters/policy/classes.py`), less what the running torch has not yet; the CPU's from
torch 2.11 to 2.13, ``aten/src/ATen/autocast_mode.cpp`` (TORCH_LIBRARY_IMPL aten, AutocastCPU). A name stands for all
overloads unless one is given. An op on no list runs in the dtype of its inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.torch_version import TorchVersion

from ...policy.classes import Rule, aten_names, class_of


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


# The first torch that has an operation on CUDA's lists, where the oldest supported one (2.11) has not.
_SINCE = {"rms_norm": "2.12"}


def cuda_lists(version: str) -> OpLists:
    """CUDA's registry in this version of torch."""
    not_yet = frozenset(name for name, since in _SINCE.items() if TorchVersion(version) < since)
    return OpLists(
        device="cuda",
        lower=aten_names(Rule.LOWER),
        fp32=aten_names(Rule.FP32)
        - class_of("lstm").aten
        - not_yet,  # autocast has the cells inside on its lists
        fp32_dtype=aten_names(Rule.FP32_DTYPE),
        widest=aten_names(Rule.WIDEST),
        banned=aten_names(Rule.BANNED),
    )


CUDA = cuda_lists(torch.__version__)

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
