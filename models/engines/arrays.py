"""Conversion between numpy and torch without copies, bfloat16 included (numpy's comes from ml_dtypes)."""

import ml_dtypes
import numpy as np
import torch

_BF16 = np.dtype(ml_dtypes.bfloat16)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory; the array must be writable."""
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """An array over a CPU tensor's memory, C-contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BF16)
    return tensor.numpy()


def floats_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a floating CPU tensor for code that has no torch: those of a half in FP32."""
    return to_numpy(tensor.float() if tensor.itemsize < 4 else tensor)
