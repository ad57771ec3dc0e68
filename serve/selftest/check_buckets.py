"""Every size that batches are filled up to is right in every slot, in FP32 and in half."""

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram

from ...models.engines.switched_off import TORCH_HALF
from ...models.spec.buckets import buckets_of
from .comparing import FP32_GAP, HALF_GAP, answers_in_flight, wrong_batches
from .nets import Net
from .outcome import FAILED, PASSED, Outcome, on_cuda_alone
from .plain_way import found, judged


def check(device: torch.device, nets: Sequence[Net]) -> Outcome:
    if device.type != "cuda":
        return on_cuda_alone("fixed batch sizes")
    originals = [(net, net.original) for net in nets]
    sizes = {net.name: list(buckets_of(net.spec, str(device))) for net in nets}
    outcome = judged(device, lambda: _faults(device, originals, FP32_GAP), "", {"sizes": sizes})
    if outcome.status != PASSED:
        return outcome
    halves = [(net, net.half(device)) for net in nets]
    if wrong := found(lambda: _faults(device, halves, HALF_GAP), device):
        return Outcome(FAILED, "; ".join(wrong), (TORCH_HALF,), outcome.figures)
    return Outcome(PASSED, "every size is right in every slot, in FP32 and in half", figures=outcome.figures)


def _faults(device: torch.device, programs: Sequence[tuple[Net, ExportedProgram]], most: float) -> list[str]:
    wrong: list[str] = []
    for net, program in programs:
        engine = net.engine(program, device)
        try:
            sizes = buckets_of(net.spec, engine.device)
            slots = range(engine.in_flight)
            batches = [net.batch(rows, seed=slot) for rows in sizes for slot in slots]
            came = answers_in_flight(engine, batches)
        finally:
            engine.close()
        wrong += wrong_batches(f"{net.name} {engine.precision}", came, net.expected(batches), most)
    return wrong
