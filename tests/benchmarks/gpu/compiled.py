"""The speed of torch.compile with live autocast and with the half of halfeven, on both nets."""

import time
from functools import partial
from typing import Any

import torch
from halfeven.models.engines.true_fp32 import use_true_fp32

from tests.benchmarks.gpu.nets import Net, batches, nets
from tests.benchmarks.gpu.phase import Phase
from tests.benchmarks.gpu.speed import autocast, half_of, on_the_device

COMPILING_S = 12.0  # a form is not begun with less


def measure(phase: Phase) -> None:
    use_true_fp32()
    torch.backends.mha.set_fastpath_enabled(False)
    for net in nets(phase):
        for way in ("half", "live autocast"):
            work = partial(_one, phase, net, way)
            phase.part("compiled", work, needs_s=1.0 if phase.tiny else COMPILING_S, net=net.name, way=way)


def _one(phase: Phase, net: Net, way: str) -> None:
    """One program for all batches. On a CPU it is traced and not compiled: that shows all but the kernels."""
    run: Any = half_of(phase, net) if way == "half" else autocast(phase, net.module().to(phase.device))
    torch._dynamo.reset()
    fast = torch.compile(run, dynamic=True, backend="inductor" if phase.cuda else "aot_eager")
    largest = torch.from_numpy(net.draw(max(batches(phase)))).to(phase.device)
    began = time.monotonic()
    with torch.inference_mode():
        expected, came = run(largest).float(), fast(largest).float()
    seconds = time.monotonic() - began
    gap = float((came - expected).abs().max() / expected.abs().max()) * 2**11
    for rows in batches(phase):
        on_the_device(
            phase,
            net,
            rows,
            f"{way}, torch.compile",
            fast,
            largest[:rows].clone(),
            compiling_s=seconds,
            gap_u=gap,
        )
