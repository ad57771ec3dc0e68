"""Attention in the ops that an ONNX file has for it: product, bias, softmax, product.

``torch.scaled_dot_product_attention`` is one op whose kernels round once; a file rounds after each of its nodes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    rounding: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor:
    """softmax(q·kᵀ·scale + bias)·v, rows that are masked whole giving NaN-free zeros as torch's kernels do.

    Arguments, shapes and meaning as `torch.nn.functional.scaled_dot_product_attention` in inference, so that
    ``dropout_p`` drops nothing; ``rounding``: of every result but the last.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = rounding(rounding(query * scale) @ key.transpose(-2, -1))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return rounding(torch.softmax(scores, -1)) @ value
    scores = rounding(scores + _bias(attn_mask, query))
    highest = scores.amax(-1, keepdim=True)
    weights = rounding(torch.softmax(scores, -1))
    return torch.where(highest == -math.inf, torch.zeros_like(weights), weights) @ value


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as numbers to add to the scores: true is 0, false is -inf; a floating mask has such numbers already."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
