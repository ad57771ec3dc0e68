"""Batches on a device: those on their way together get their own answers under a load beside them, every size that they
are filled up to is right in every slot, and they take no memory of the device that they do not give back.
"""

import gc
import random
from collections.abc import Sequence

import torch
from torch.export import ExportedProgram

from ...models.engines.memory import free_cuda_bytes
from ...models.engines.staging import StreamName, cuda_streams
from ...models.engines.switched_off import TORCH_HALF
from ...models.spec.buckets import buckets_of
from .nets import FP32_GAP, HALF_GAP, Net, Parts, answers_in_flight, wrong_batches
from .plain_way import FAILED, PASSED, Outcome, found, judged

BATCHES = 24  # of each net
LOADED_EVERY = 6  # batches
ELEMENTS = 1 << 16  # of a tensor of the load
ROUNDS = 3  # of batches of all sizes, for the memory that they take


def ordering(device: torch.device, nets: Sequence[Net]) -> Outcome:
    batches = {net.name: _mixed(net) for net in nets}
    expected = {net.name: net.expected(batches[net.name]) for net in nets}

    def faults() -> list[str]:
        wrong: list[str] = []
        for net in nets:
            engine, came = net.engine(net.original, device), []
            try:
                # The engine's slots have their memory then, as in a server.
                engine.warm_up(net.batch(net.spec.max_batch_size))
                for start in range(0, BATCHES, LOADED_EVERY):
                    _load(device)
                    came += answers_in_flight(engine, batches[net.name][start : start + LOADED_EVERY])
            finally:
                engine.close()
            wrong += wrong_batches(net.name, came, expected[net.name], FP32_GAP)
        return wrong

    return judged(
        device,
        faults,
        f"{BATCHES} batches of each of {len(nets)} nets are right under a load beside them",
        {"batches": BATCHES * len(nets)},
    )


def _mixed(net: Net) -> list[Parts]:
    """Batches of one to three requests and up to the most rows."""
    chance = random.Random(0)
    share = max(net.spec.max_batch_size // 3, 1)
    counts = ([chance.randint(1, share) for _ in range(chance.randint(1, 3))] for _ in range(BATCHES))
    return [net.batch(*rows, seed=seed) for seed, rows in enumerate(counts)]


def _load(device: torch.device) -> None:
    """Undone work in the default stream, and NaN in memory that the engine's streams will take: what is read too early
    shows."""
    busy = torch.ones(ELEMENTS, device=device)
    for _ in range(8):
        busy = busy * 2
    names: tuple[StreamName, ...] = ("in", "compute")
    for name in names:
        cuda_streams(device).enqueue(name, lambda: _rubbish(device))


def _rubbish(device: torch.device) -> None:
    torch.full((ELEMENTS,), float("nan"), device=device)


def batch_sizes(device: torch.device, nets: Sequence[Net]) -> Outcome:
    originals = [(net, net.original) for net in nets]
    sizes = {net.name: list(buckets_of(net.spec, str(device))) for net in nets}
    outcome = judged(device, lambda: _wrong_at_sizes(device, originals, FP32_GAP), "", {"sizes": sizes})
    if outcome.status != PASSED:
        return outcome
    halves = [(net, net.half(device)) for net in nets]
    if wrong := found(lambda: _wrong_at_sizes(device, halves, HALF_GAP), device):
        return Outcome(FAILED, "; ".join(wrong), (TORCH_HALF,), outcome.figures)
    return Outcome(PASSED, "every size is right in every slot, in FP32 and in half", figures=outcome.figures)


def _wrong_at_sizes(
    device: torch.device, programs: Sequence[tuple[Net, ExportedProgram]], most: float
) -> list[str]:
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


def memory(device: torch.device, nets: Sequence[Net]) -> Outcome:
    figures: dict[str, int] = {"free_bytes": free_cuda_bytes(device)}

    def faults() -> list[str]:
        return [fault for net in nets for fault in _memory_kept(net, device, figures)]

    return judged(device, faults, "batches and closed engines give their memory back", figures)


def _memory_kept(net: Net, device: torch.device, figures: dict[str, int]) -> list[str]:
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
