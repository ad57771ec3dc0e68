"""``halfeven doctor``: what this machine can do, and what to install."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import onnxruntime
import torch

from ...models.engines.cpu.packed import multiplies_bf16
from ...models.version import __version__

TESTED_TORCH = ("2.11", "2.13")
FASTER_FROM = (7, 0)  # tensor cores: below this compute capability FP16 is not faster


def examine() -> dict[str, Any]:
    """One line per thing looked at: what, found, advice (empty where there is nothing to do)."""
    checks = [_check("halfeven", __version__), *_machine(), _torch(), *_cuda(), _onnxruntime(), _protobuf()]
    return {"checks": checks, "cuda": torch.cuda.is_available()}


def _check(what: str, found: str, advice: str = "") -> dict[str, str]:
    return {"what": what, "found": found, "advice": advice}


def _machine() -> list[dict[str, str]]:
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}{', bf16' if multiplies_bf16() else ''}"
    return [_check("python", platform.python_version()), _check("cpu", found, _cpu_advice())]


def _cpu_advice() -> str:
    if torch.cuda.is_available():
        return ""
    if multiplies_bf16():
        return 'this CPU multiplies bf16, not FP16: `--level mixed_bfloat16`; `form = "auto"` measures and decides'
    return 'FP16 is rarely faster on a CPU: `form = "auto"` measures and decides'


def _torch() -> dict[str, str]:
    found = torch.__version__
    known = found.startswith(TESTED_TORCH)
    return _check(
        "torch", found, "" if known else f"tested with {' and '.join(TESTED_TORCH)}; others may work"
    )


def _cuda() -> list[dict[str, str]]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = (
            "no NVIDIA driver or device is visible"
            if built
            else "this torch is a CPU build: install a CUDA build"
        )
        return [_check("cuda", "none", advice)]
    checks = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        slow = (
            "" if capability >= FASTER_FROM else "compute capability below 7.0: FP16 will not be faster here"
        )
        name = torch.cuda.get_device_name(index)
        checks.append(
            _check(f"cuda:{index}", f"{name}, compute capability {capability[0]}.{capability[1]}", slow)
        )
    return checks


def _onnxruntime() -> dict[str, str]:
    providers = onnxruntime.get_available_providers()
    advice = ""
    if torch.cuda.is_available() and "CUDAExecutionProvider" not in providers:
        advice = "the ONNX form cannot use the GPU: pip install onnxruntime-gpu (and remove onnxruntime)"
    return _check("onnxruntime", f"{onnxruntime.__version__}: {', '.join(providers)}", advice)


def _protobuf() -> dict[str, str]:
    try:
        found = version("protobuf")
    except PackageNotFoundError:
        return _check("protobuf", "none", "pip install 'protobuf>=6.31.1,<7'")
    advice = (
        "" if int(found.partition(".")[0]) < 7 else "7 is too new for tritonclient: pip install 'protobuf<7'"
    )
    return _check("protobuf", found, advice)
