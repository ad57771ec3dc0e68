"""The facts of this machine's processor: its name, its instructions, and the kernels that torch and oneDNN have for it.
No other file asks torch about the processor.

A decision reads a `Processor`, so that its test gives the facts of any processor; the time that kernels take is
measured in `kernel_costs.py`. Needs torch alone: the trainer loads this file by its path.
"""

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Processor:
    """``instructions``: what torch's own kernels use (``AVX2``, ``AVX512``); ``limit``: the most that oneDNN may use,
    empty where ``ONEDNN_MAX_CPU_ISA`` does not restrict it.

    ``onednn``: oneDNN's packed kernels exist here. ``bf16_kernels``, ``fp16_kernels``: oneDNN computes in that type.
    ``bf16_units``, ``fp16_units``: the processor multiplies that type itself (AVX512-BF16, AVX512-FP16, AMX); others
    convert, which takes longer.
    """

    name: str
    machine: str
    instructions: str
    limit: str = ""
    onednn: bool = True
    bf16_kernels: bool = False
    fp16_kernels: bool = False
    bf16_units: bool = False
    fp16_units: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.instructions}" + (f", oneDNN up to {self.limit}" if self.limit else "")

    def units(self) -> list[str]:
        """The half types that the processor multiplies itself."""
        return [name for name, found in (("bf16", self.bf16_units), ("fp16", self.fp16_units)) if found]

    def computes(self, dtype: torch.dtype) -> bool:
        """True if oneDNN has kernels for this dtype; wherever oneDNN exists, it has those of FP32."""
        found = {torch.bfloat16: self.bf16_kernels, torch.float16: self.fp16_kernels, torch.float32: True}
        return self.onednn and found.get(dtype, False)


@cache
def this_processor() -> Processor:
    """The processor that this process runs on, under the restrictions in its environment (``ATEN_CPU_CAPABILITY``,
    ``ONEDNN_MAX_CPU_ISA``; the second is read here, because torch does not tell what oneDNN found)."""
    machine, flags = platform.machine(), _flags()
    return Processor(
        name=_field("model name") or "unknown processor",
        machine=machine,
        instructions=torch.backends.cpu.get_cpu_capability(),
        limit=os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        onednn=machine in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available(),
        bf16_kernels=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        fp16_kernels=bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
        bf16_units=torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        fp16_units="avx512_fp16" in flags or torch.cpu._is_amx_fp16_supported(),
    )


def _field(name: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty where the system has no such file."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _flags() -> set[str]:
    return set(_field("flags").split())
