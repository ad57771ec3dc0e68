"""Batches on their way together get their own answers, under a load beside them."""

import random
from collections.abc import Sequence

import torch

from ...models.engines.staging import StreamName, cuda_streams
from .comparing import FP32_GAP, answers_in_flight, wrong_batches
from .nets import Net, Parts
from .outcome import Outcome, on_cuda_alone
from .plain_way import judged

BATCHES = 24  # of each net
LOADED_EVERY = 6  # batches
ELEMENTS = 1 << 16  # of a tensor of the load


def check(device: torch.device, nets: Sequence[Net]) -> Outcome:
    if device.type != "cuda":
        return on_cuda_alone("streams whose order could be wrong")
    batches = {net.name: _mixed(net) for net in nets}
    expected = {net.name: net.expected(batches[net.name]) for net in nets}

    def faults() -> list[str]:
        wrong: list[str] = []
        for net in nets:
            engine, came = net.engine(net.original, device), []
            try:
                # Its slots have their memory then, as in a server.
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
