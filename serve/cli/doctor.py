"""``halfeven doctor``: what this machine can do, and what to install."""

import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from ...exporters.on_device.selftest_record import record_here
from ...models.machine.kernel_costs import costs_here
from ...models.machine.processor import Processor, this_processor
from ...models.machine.usable_cores import cores_here
from ...models.version import __version__

TESTED_TORCH = ("2.11", "2.13")
_ELSEWHERE = (
    "only Linux limits the memory of child processes, reads a file that was checked even where another one takes its "
    "place, and times single requests (bench --rate): convert only models of your own here"
)
FASTER_FROM = (7, 0)  # tensor cores: below this compute capability FP16 is not faster


def examine(store: Path) -> dict[str, Any]:
    """One line per thing looked at: what, found, advice (empty where there is nothing to do). ``store``: the folder of
    a store, which has the results of the selftest; it may be missing."""
    checks = [
        *(_check("halfeven", __version__), *_machine(), _torch(), *_cuda()),
        *(_onnxruntime(), *_selftests(store)),
    ]
    return {"checks": checks, "cuda": torch.cuda.is_available()}


def _check(what: str, found: str, advice: str = "") -> dict[str, str]:
    return {"what": what, "found": found, "advice": advice}


def _machine() -> list[dict[str, str]]:
    processor = this_processor()
    found = ", ".join([str(cores_here()), processor.instructions, *processor.units()])
    return [
        _check("python", platform.python_version()),
        _check(
            "system",
            f"{platform.system()} {platform.machine()}",
            "" if sys.platform == "linux" else _ELSEWHERE,
        ),
        _check("cpu", found, "" if torch.cuda.is_available() else _cpu_advice(processor)),
        *(_kernels(dtype, name) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))),
    ]


def _cpu_advice(processor: Processor) -> str:
    if processor.units():
        units = " and ".join(processor.units())
        return (
            f'this CPU multiplies {units} itself: `halfeven convert --dtype` makes such a half, and `form = "auto"` '
            "serves it where it is measured faster"
        )
    return 'FP16 is rarely faster on a CPU: `form = "auto"` measures and decides'


def _kernels(dtype: torch.dtype, name: str) -> dict[str, str]:
    """The processor time of each kind of kernel, FP32's being 1, as measured now: below 1 it is faster."""
    costs = costs_here(dtype)
    slow = [kind for kind, cost in costs.items() if cost.slow_to_train]
    advice = (
        f'`precision = "auto"` of a fine-tuning job finds out; slow to train in {name}: {", ".join(slow)}'
    )
    return _check(
        f"time of {name} kernels, FP32 = 1",
        ", ".join(f"{kind} {cost}" for kind, cost in costs.items()),
        advice if slow else "",
    )


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
            else "this torch is a CPU build; for an NVIDIA GPU install a CUDA build"
        )
        return [_check("cuda", "none", advice)]
    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> dict[str, str]:
    major, minor = capability = torch.cuda.get_device_capability(index)
    found = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    advice = "" if capability >= FASTER_FROM else "compute capability below 7.0: FP16 will not be faster here"
    built = torch.cuda.get_arch_list()
    if not any(_runs(one, capability) for one in built):
        advice = (
            f"this torch has no kernels for it (it has {', '.join(built)}): install another build of torch"
        )
    return _check(f"cuda:{index}", found, advice)


def _selftests(store: Path) -> list[dict[str, str]]:
    """The result of the selftest on each device."""
    names = [
        f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return [_selftest(store, torch.device(name)) for name in (*names, "cpu")]


def _selftest(store: Path, device: torch.device) -> dict[str, str]:
    what, again = f"selftest {device}", f"`halfeven selftest --device {device} --store {store}`"
    try:
        record = record_here(store, device)
    except ValueError as error:
        return _check(what, "unreadable", str(error))
    if record is None:
        return _check(what, "not run", f"{again} checks it before it serves" if device.type == "cuda" else "")
    if not record.off:
        return _check(what, f"passed on {record.at}")
    reasons = "; ".join(f"{feature}: {why}" for feature, why in record.off.items())
    found = f"failed on {record.at}; switched off: {', '.join(record.off)}"
    return _check(what, found, f"{reasons}. Once mended, {again} switches on what passes")


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """True if code built for ``sm_XY`` or ``compute_XY`` runs on a device.

    Machine code runs on its own major version from its minor on; PTX (``compute``) on everything later (CUDA C++
    Programming Guide, "Binary Compatibility" and "PTX Compatibility"). ``sm_90a`` and its like run on that one alone.
    """
    kind, _, number = built.partition("_")
    if not number.isdigit():
        return number.rstrip("af") == f"{capability[0]}{capability[1]}"
    major, minor = int(number[:-1]), int(number[-1])
    if kind == "compute":
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def _onnxruntime() -> dict[str, str]:
    providers = onnxruntime.get_available_providers()
    advice = ""
    if torch.cuda.is_available() and "CUDAExecutionProvider" not in providers:
        advice = "the ONNX form cannot use the GPU: pip install onnxruntime-gpu (and remove onnxruntime)"
    elif torch.cuda.is_available():
        advice = _cuda_session_fault()
    return _check("onnxruntime", f"{onnxruntime.__version__}: {', '.join(providers)}", advice)


def _cuda_session_fault() -> str:
    """The reason why ONNX Runtime cannot compute on the GPU (a provider that is listed may lack a library or a kernel);
    empty where it can."""
    text = (
        '<ir_version: 10, opset_import: ["": 17]> doubled (float16[2] x) => (float16[2] y) { y = Add(x, x) }'
    )
    model = onnx.parser.parse_model(text).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CUDAExecutionProvider"])
        if session.get_providers()[0] != "CUDAExecutionProvider":
            return "the ONNX form cannot use the GPU: a CUDA or cuDNN library that onnxruntime-gpu needs is missing"
        (answer,) = session.run(None, {"x": np.array([1, 2], np.float16)})
    except Exception as error:
        return f"the ONNX form cannot use the GPU: {str(error)[:200]}"
    return "" if np.asarray(answer).tolist() == [2, 4] else "the ONNX form computes wrong results on the GPU"
