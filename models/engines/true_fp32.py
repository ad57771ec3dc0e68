"""FP32 means FP32: no TF32 on CUDA, no bf16 products on a CPU. The settings are the process's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..machine.library_variables import refuse_lesser_fp32


def use_true_fp32() -> None:
    """FP32 products and convolutions are computed in FP32; products of halves accumulate in FP32.

    Torch has an older and a newer interface to the same settings, and convolution and recurrence keep their own: all
    are set, the older first, so that both read the same (docs.pytorch.org, notes/cuda, "TensorFloat-32").

    Raises BadSetting where an environment variable makes oneDNN compute FP32 less precisely: no setting of torch
    changes that.
    """
    refuse_lesser_fp32()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for settings in _settings():
        settings.fp32_precision = "ieee"
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def settings_kept() -> Iterator[None]:
    """The process's settings are after the block as they were before it."""
    products = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn  # torch gives its modules no type
    older = [_older(torch.get_float32_matmul_precision), _older(lambda: convolutions.allow_tf32)]
    fp16 = products.allow_fp16_reduced_precision_reduction
    bf16 = products.allow_bf16_reduced_precision_reduction
    precisions = [settings.fp32_precision for settings in _settings()]
    try:
        yield
    finally:
        if older[0] is not None:
            torch.set_float32_matmul_precision(older[0])
        if older[1] is not None:
            convolutions.allow_tf32 = older[1]
        # The setting for all comes last: torch changes it when oneDNN's own is set.
        for settings, precision in reversed([*zip(_settings(), precisions, strict=True)]):
            settings.fp32_precision = precision
        products.allow_fp16_reduced_precision_reduction = fp16
        products.allow_bf16_reduced_precision_reduction = bf16


def _older(read: Callable[[], Any]) -> Any:
    """A setting of torch's older interface; None where the newer one says another, torch refuses to read it then."""
    try:
        return read()
    except RuntimeError:
        return None


def _settings() -> tuple:  # type: ignore[type-arg]  # torch gives these modules no type
    all_of, cuda, cudnn, onednn = (
        torch.backends,
        torch.backends.cuda,
        torch.backends.cudnn,
        torch.backends.mkldnn,
    )
    return (
        *(all_of, cuda.matmul),
        *(cudnn, cudnn.conv, cudnn.rnn),
        *(onednn, onednn.matmul, onednn.conv, onednn.rnn),
    )
