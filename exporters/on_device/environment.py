"""The environment of a proof, which holds for one artefact on one kind of device under one set of libraries."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.machine.processor import Processor, hardware

if TYPE_CHECKING:
    import torch


def environment(device: "torch.device | str") -> dict[str, Any]:
    """The kind of device and the versions of what computes on it: on CUDA also its driver and cuDNN."""
    below: Mapping[str, Any] = {}
    if str(device) != "cpu":
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        kind = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        below = {"driver": _driver(), "cudnn": torch.backends.cudnn.version()}
    else:
        kind = _kind_of(hardware())
    return {
        "device": kind,
        "torch": _version("torch"),
        "onnxruntime": _version("onnxruntime"),
        **below,
    }


def _kind_of(processor: Processor) -> str:
    """oneDNN has other kernels than torch, others again where the processor multiplies a half type itself or only
    converts it, and fewer where ``ONEDNN_MAX_CPU_ISA`` restricts it."""
    kernels = ["oneDNN", *processor.units()] if processor.onednn else []
    if processor.onednn and processor.converts_halves:
        kernels.append("converted halves")
    if processor.onednn and processor.limit:
        kernels.append(f"up to {processor.limit}")
    return ", ".join([f"cpu {processor.machine} {processor.instructions}", *kernels])


@cache
def _driver() -> str:
    """The NVIDIA driver's version, as the kernel module gives it; empty where it gives none."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
    return next((word for word in line.split() if word[0].isdigit()), "")


@cache
def _version(module: str) -> str:
    """The version of what Python imports under this name, without importing it. It is read from the module's own files:
    ONNX Runtime's packages have several names, and one that is installed later replaces the files of another."""
    found = None
    with suppress(ModuleNotFoundError):  # an import hook may refuse it
        found = find_spec(module)
    if found is not None and found.origin:
        folder = Path(found.origin).parent
        for path in filter(Path.is_file, (folder / "version.py", folder / "__init__.py")):
            if said := re.search(r"""^__version__ = ['"](.+)['"]""", path.read_text("utf-8"), re.MULTILINE):
                return said[1]
    with suppress(PackageNotFoundError):
        return version(module)
    return "none"
