"""The machine and its ceilings: matrix products, copies, and the cost of a call from Python."""

import os
import platform
import subprocess
import time
from importlib.metadata import distributions
from shutil import which

import torch
from halfeven.exporters.on_device.environment import environment
from halfeven.models.engines.true_fp32 import use_true_fp32

from tests.benchmarks.gpu.packages import BESIDE, unsuited, wanted
from tests.benchmarks.gpu.phase import Phase


def measure(phase: Phase) -> None:
    _write_packages(phase)
    versions = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    phase.facts.add("machine", **versions, **environment(phase.device))
    needed = [one for one in wanted() if one != BESIDE]  # without it the tests take one process
    phase.facts.claim("packages", not (found := unsuited(needed)), unsuited=found)
    for kind in ("fp16", "bf16", "fp32", "tf32"):
        phase.part("product", lambda kind=kind: _product(phase, kind), type=kind)
    phase.part("copies", lambda: _copies(phase))
    phase.part("calls", lambda: _calls(phase))


def _write_packages(phase: Phase) -> None:
    """Write the packages into a file that comes back: `machine.txt` beside this module can be made of it."""
    lines = sorted(f"{one.metadata['Name']}=={one.version}" for one in distributions())
    file = phase.facts.out / "machine.txt"
    said = (
        subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout if which("nvidia-smi") else ""
    )
    file.write_text("\n".join([*lines, said]))


def _product(phase: Phase, kind: str) -> None:
    size = 128 if phase.tiny else 8192
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    use_true_fp32()
    if kind == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    one, other = (torch.randn(size, size).to(phase.device, dtype) for _ in range(2))
    took = phase.device_ms(lambda: one @ other, 0.3)
    use_true_fp32()
    phase.facts.add("product", type=kind, size=size, ms=took, tflops=2 * size**3 / took / 1e9)


def _copies(phase: Phase) -> None:
    count = 2**16 if phase.tiny else 2**30
    there, target = (torch.empty(count, dtype=torch.uint8, device=phase.device) for _ in range(2))
    within = phase.device_ms(lambda: target.copy_(there), 0.2)
    phase.facts.add("copy on the device, read and written", gb_s=2 * count / within / 1e6)
    if not phase.cuda:
        return
    sent = count // 4
    host, part = torch.empty(sent, dtype=torch.uint8, pin_memory=True), there[:sent]
    to, back = (lambda: part.copy_(host, non_blocking=True)), (lambda: host.copy_(part, non_blocking=True))
    for name, copy in (("to the device", to), ("to the host", back)):
        phase.facts.add(f"pinned copy {name}", gb_s=sent / phase.device_ms(copy, 0.2) / 1e6)


def _calls(phase: Phase) -> None:
    tensor, calls = torch.ones(16, device=phase.device), 100 if phase.tiny else 2000
    phase.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        torch.ops.aten.add_.Tensor(tensor, 1.0)
    launched = time.perf_counter() - began
    phase.synchronize()
    phase.facts.add(
        "one operation called from Python",
        host_us=launched / calls * 1e6,
        with_device_us=(time.perf_counter() - began) / calls * 1e6,
    )
