"""The most memory that this process has had. Needs torch alone."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """``peak_memory_bytes``: resident (getrusage; KiB on Linux, bytes on macOS); ``peak_device_bytes``: of tensors on a
    CUDA device, None on another."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "peak_memory_bytes": found if sys.platform == "darwin" else found * 1024,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
