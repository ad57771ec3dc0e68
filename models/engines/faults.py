"""The meaning of an engine's error for later requests: too little memory, a device that is gone, or neither.

Torch has types for some of it and ONNX Runtime only messages, so both are looked at, here and nowhere else. Types of
torch are known by their names: a process that runs ONNX files alone need not have it.
"""

import logging
import sys

from ..order.lacking_memory import NO_MEMORY, causes

logger = logging.getLogger("halfeven.engines")
# Lower case, beside those of processors (`order/lacking_memory.py`): cuBLAS, CUDA, ONNX Runtime's arenas, cuDNN.
_NO_MEMORY = (
    *NO_MEMORY,
    "alloc_failed",
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda failure 2:",
    "available memory of",  # ONNX Runtime's arena under a limit: "… is smaller than requested bytes of …"
    "allocation_failed",
    "find was unable to find an engine",  # cuDNN, where no algorithm's workspace fits
)
# Torch's dispatcher and its kernels, cuFFT.
_NO_HALF_KERNEL = (
    "not implemented for 'half'",
    "not implemented for 'bfloat16'",
    "unsupported dtype half",
    "unsupported dtype bfloat16",
    "when computing in half precision",
)
_OF_CUDA = ("cuda", "cublas", "cudnn")
# CUDA errors after which the process's context answers nothing but the same error (CUDA Runtime API, "sticky" errors).
_GONE = (
    "device-side assert",
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "uncorrectable",
    "contained error",
    "unknown error",
    "no cuda-capable device",
    "busy or unavailable",
    "context is destroyed",
    "status_execution_failed",
)


def out_of_memory(error: BaseException) -> bool:
    """True if the device or the host had no memory for this run, so that fewer rows may do."""
    return any(
        isinstance(one, MemoryError) or _is(one, "OutOfMemoryError") or _mentions(one, _NO_MEMORY)
        for one in causes(error)
    )


def no_half_kernel(error: BaseException) -> bool:
    """True if an operation has no kernel for halves on the device, which may compute it in FP32."""
    return any(_mentions(one, _NO_HALF_KERNEL) for one in causes(error))


def device_lost(error: BaseException) -> bool:
    """True if every later call on the device will fail in this process: a sticky CUDA error."""
    return any(
        (_is(one, "AcceleratorError") or _mentions(one, _OF_CUDA)) and _mentions(one, _GONE)
        for one in causes(error)
    )


def device_answers(error: BaseException, device: str) -> bool:
    """True if the device still computes after this error: asked only where the text is of CUDA and says neither.

    An operation on one element and a synchronisation; a device with too little memory for that answers as well.
    """
    if not device.startswith("cuda") or not _is_of_cuda(error) or out_of_memory(error):
        return True
    import torch

    try:
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return True
    except Exception:
        return False
    return True


def _is_of_cuda(error: BaseException) -> bool:
    return any(_is(one, "AcceleratorError") or _mentions(one, _OF_CUDA) for one in causes(error))


def _is(error: BaseException, name: str) -> bool:
    return any(one.__name__ == name for one in type(error).__mro__)


def _mentions(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)


def give_back_cached_memory() -> None:
    """Free device memory that torch's allocator keeps unused, of all models. Never raises: where it fails the memory
    stays kept, and what needs it says so."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.empty_cache()
    except Exception as error:
        logger.warning("the device's unused memory could not be given back: %s", error)
