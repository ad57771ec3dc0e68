"""Batches take no memory of the device that they do not give back, and neither does an engine that is closed."""

import gc
from collections.abc import Sequence

import torch

from ...models.engines.memory import free_cuda_bytes
from ...models.spec.buckets import buckets_of
from .comparing import answers_in_flight
from .nets import Net
from .outcome import Outcome, on_cuda_alone
from .plain_way import judged

ROUNDS = 3


def check(device: torch.device, nets: Sequence[Net]) -> Outcome:
    if device.type != "cuda":
        return on_cuda_alone("memory of its own")
    figures: dict[str, int] = {"free_bytes": free_cuda_bytes(device)}

    def faults() -> list[str]:
        return [fault for net in nets for fault in _faults(net, device, figures)]

    return judged(device, faults, "batches and closed engines give their memory back", figures)


def _faults(net: Net, device: torch.device, figures: dict[str, int]) -> list[str]:
    _taken_by_rounds(net, device, 1)  # what libraries keep for ever is taken once
    gc.collect()
    before = _allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    growth = _taken_by_rounds(net, device, ROUNDS)
    figures[f"{net.name}_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    left = _allocated(device) - before
    faults = [f"{net.name}: its batches keep {growth} bytes more after each round"] if growth > 0 else []
    return faults + ([f"{net.name}: {left} bytes are taken after its engine was closed"] if left > 0 else [])


def _taken_by_rounds(net: Net, device: torch.device, rounds: int) -> int:
    """Bytes that an engine's batches of all sizes took after the first round and did not give back, per round."""
    engine = net.engine(net.original, device)
    try:
        batches = [
            net.batch(rows) for rows in buckets_of(net.spec, engine.device) for _ in range(engine.in_flight)
        ]
        answers_in_flight(engine, batches)
        first = _allocated(device)
        for _ in range(1, rounds):
            answers_in_flight(engine, batches)
        return (_allocated(device) - first) // max(rounds - 1, 1)
    finally:
        engine.close()


def _allocated(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
