"""Between numpy and torch without copies, bfloat16 included (numpy's comes from ml_dtypes)."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch

_COPIED_UNDER_LOCK = 500  # elements: NPY_BEGIN_THREADS_THRESHOLDED in numpy's copies
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


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts joined along the first axis in new memory: a request's own bytes are never written to.

    numpy releases Python's lock once for each part of more than 500 elements, and waits for it again; under load
    that took longer than all of the copying. Bytes are joined without releasing the lock.
    """
    if len(parts) == 1:
        return parts[0].copy()
    first = parts[0]
    if first.size <= _COPIED_UNDER_LOCK:
        return np.concatenate(parts)
    memory = bytearray().join([np.ascontiguousarray(part).view(np.uint8) for part in parts])  # type: ignore[list-item]
    return np.frombuffer(memory, first.dtype).reshape(-1, *first.shape[1:])
