"""What evidence is bound to: a proof holds for one artefact on one kind of device under one set of libraries."""

import platform
from typing import Any

import onnxruntime
import torch

from ..models.engines.packed import can_pack


def environment(device: torch.device) -> dict[str, Any]:
    """The kind of device and the versions of what computes on it."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    else:
        kind = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        if can_pack():  # other kernels, and others again where the processor multiplies bf16 itself
            kind += ", oneDNN, bf16" if torch.cpu._is_avx512_bf16_supported() else ", oneDNN"
    return {"device": kind, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
