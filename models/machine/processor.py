"""The facts of this machine's processor: its name, its instructions, and the kernels that torch and oneDNN have for it.
No other file asks torch about the processor.

A decision reads a `Processor`, so that its test gives the facts of any processor; the time that kernels take is
measured in `kernel_costs.py`. Needs torch for the kernels alone.
"""

import os
import platform
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPUINFO = Path("/proc/cpuinfo")
# The extensions of ARM for which libraries have kernels of their own, as Linux names them: FP16, dot products, bf16,
# products of 8-bit integers, vectors and matrices of other lengths.
_OF_ARM = ("asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme", "sme2")


@dataclass(frozen=True, slots=True)
class Processor:
    """``instructions``: what torch's own kernels use (``AVX2``, ``AVX512``), on ARM what kernels are chosen by
    (``ASIMDHP+ASIMDDP+SVE``), and ``DEFAULT`` where there is nothing of it; ``limit``: the most that oneDNN may use,
    empty where ``ONEDNN_MAX_CPU_ISA`` does not restrict it.

    ``onednn``: oneDNN's packed kernels exist here. ``bf16_kernels``, ``fp16_kernels``: oneDNN computes in that type.
    ``bf16_units``, ``fp16_units``: the processor multiplies that type itself (AVX512-BF16, AVX512-FP16, AMX); others
    convert, which takes longer. ``converts_halves``: it converts both types itself (AVX-NE-CONVERT), for which oneDNN
    has kernels of its own.
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
    converts_halves: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.instructions}" + (f", oneDNN up to {self.limit}" if self.limit else "")

    def units(self) -> list[str]:
        """The half types that the processor multiplies itself."""
        return [name for name, found in (("bf16", self.bf16_units), ("fp16", self.fp16_units)) if found]

    def computes(self, dtype: "torch.dtype") -> bool:
        """True if oneDNN has kernels for this dtype; wherever oneDNN exists, it has those of FP32."""
        found = {
            "torch.bfloat16": self.bf16_kernels,
            "torch.float16": self.fp16_kernels,
            "torch.float32": True,
        }
        return self.onednn and found.get(str(dtype), False)


@cache
def this_processor() -> Processor:
    """The processor that this process runs on, and the kernels that oneDNN has for it in torch."""
    import torch

    # A torch that was built without oneDNN has none of its operators.
    if not torch.backends.mkldnn.is_available():
        return replace(hardware(), onednn=False)
    return replace(
        hardware(),
        bf16_kernels=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        fp16_kernels=bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    )


@cache
def hardware() -> Processor:
    """The processor of this machine, without what oneDNN's kernels can do, so that torch is not imported. The
    environment's restrictions count (``ATEN_CPU_CAPABILITY``, ``ONEDNN_MAX_CPU_ISA``)."""
    machine, flags = platform.machine(), set(_field("flags").split())
    is_x86 = machine in ("x86_64", "AMD64")
    return Processor(
        name=_name(),
        machine=machine,
        instructions=_instructions(flags) if is_x86 else _instructions_of_arm(),
        limit=os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        onednn=is_x86 and _has_torch(),  # its wheels for other machines have another library
        bf16_units=not flags.isdisjoint(("avx512_bf16", "amx_tile")),
        fp16_units=not flags.isdisjoint(("avx512_fp16", "amx_fp16")),
        converts_halves="avx_ne_convert" in flags,
    )


def _instructions(flags: set[str]) -> str:
    """The instructions that torch's own kernels use, by its rule (``aten/src/ATen/native/DispatchStub.cpp``)."""
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    if asked in ("avx512", "avx2", "default"):  # torch ignores any other word, ``AVX2`` too
        return asked.upper()
    if {"avx512vl", "avx512bw", "avx512dq", "fma"} <= flags:
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= flags else "DEFAULT"


def _instructions_of_arm() -> str:
    features = set(_field("Features").split())
    return "+".join(name.upper() for name in _OF_ARM if name in features) or "DEFAULT"


def _name() -> str:
    """The name of the processor; of one of ARM, where Linux knows none or the same for all, the numbers of its maker
    and of its kind, which ``lscpu`` has words for."""
    maker, kind = _field("CPU implementer"), _field("CPU part")
    if maker and kind:
        return f"ARM processor {maker} {kind}"
    return _field("model name") or "unknown processor"


def _has_torch() -> bool:
    try:
        return bool(version("torch"))
    except PackageNotFoundError:
        return False


def _field(name: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty where the system has no such file."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
