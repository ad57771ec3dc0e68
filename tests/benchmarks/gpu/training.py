"""Milliseconds and peak memory of a training step of BERT-base: our loop in each precision, beside torch's own."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from halfeven.models.engines.true_fp32 import use_true_fp32
from halfeven.serve.finetune.training.loop.amp import train
from halfeven.serve.finetune.training.loop.half_model import HalfModel
from halfeven.serve.finetune.training.loop.training_terms import DTYPES, Settings
from torch import Tensor, nn

from tests.benchmarks.gpu.nets import Net, nets
from tests.benchmarks.gpu.phase import Phase

WARM = 2  # steps that are not counted
# The precision and level of ours (None: the plain loop), those that say most first.
CASES = (
    ("fp16", "O1"),
    ("fp16", None),
    ("fp32", "O1"),
    ("fp32", None),
    ("fp16", "O2"),
    ("bf16", "O1"),
    ("bf16", None),
)


def measure(phase: Phase) -> None:
    use_true_fp32()
    (net,) = nets(phase, "BERT-base")
    for precision, level in CASES:
        work = partial(_one, phase, net, precision, level)
        phase.part("training", work, needs_s=3.0, precision=precision, level=level)


def _one(phase: Phase, net: Net, precision: str, level: str | None) -> None:
    rows, steps = (2, 4) if phase.tiny else (32, 12)
    module = net.module().requires_grad_(True).to(phase.device).train()
    inputs = torch.from_numpy(net.draw(rows * steps))

    def loss_with(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda batch: forward(inputs[batch].to(phase.device)).float().pow(2).mean()

    if level is None:
        going = _plain(phase, module, loss_with(module), rows, steps, DTYPES[precision])
    else:
        forward: Any = HalfModel(module, DTYPES[precision]) if level == "O2" else module
        settings = Settings(batch_size=rows, precision=precision, opt_level=level, learning_rate=1e-5)
        going = train(module, loss_with(forward), len(inputs), settings, str(phase.device))
    with phase.peak_mib() as peak:
        list(islice(going, WARM))
        phase.synchronize()
        began = time.perf_counter()
        list(islice(going, steps - WARM))  # and not to its end, where our loop looks through all weights
        phase.synchronize()
        step_ms = (time.perf_counter() - began) * 1e3 / (steps - WARM)
        phase.facts.add(
            "training", net=net.name, rows=rows, precision=precision, level=level or "plain torch",
            step_ms=step_ms, peak_mib=peak(),
        )  # fmt: skip


def _plain(
    phase: Phase,
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    rows: int,
    steps: int,
    dtype: torch.dtype,
) -> Iterator[None]:
    """The loop of torch's own documentation."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=phase.cuda and not phase.simulated)
    kind = phase.device.type
    scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16)
    for step in range(steps):
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not torch.float32):
            loss = loss_of(torch.arange(step * rows, (step + 1) * rows))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield
