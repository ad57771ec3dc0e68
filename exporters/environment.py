"""The environment of a proof, which holds for one artefact on one kind of device under one set of libraries."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..models.engines.cpu.packed import can_pack, multiplies_bf16


def environment(device: torch.device) -> dict[str, Any]:
    """The kind of device and the versions of what computes on it: on CUDA also its driver and cuDNN."""
    below: Mapping[str, Any] = {}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        below = {"driver": _driver(), "cudnn": torch.backends.cudnn.version()}
    else:
        kind = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        if can_pack():  # other kernels, and others again where the processor multiplies bf16 itself
            kind += ", oneDNN, bf16" if multiplies_bf16() else ", oneDNN"
    return {"device": kind, "torch": str(torch.__version__), "onnxruntime": _onnxruntime(), **below}


@cache
def _driver() -> str:
    """The NVIDIA driver's version, as the kernel module gives it; empty where it gives none."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
    return next((word for word in line.split() if word[0].isdigit()), "")


@cache
def _onnxruntime() -> str:
    """ONNX Runtime's version, under any name it is installed as; without importing it (17 MB in a server)."""
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
