"""Nets that are recorded as CUDA graphs on the simulated GPU, and their batches in flight."""

import random

import pytest
import torch
from halfeven.models.engines import torch_engine
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.serve.selftest.nets import answers_in_flight
from torch import Tensor, nn

from tests.models.engines.simulated_runs import WIDTH, differs, rows
from tests.programs import Original, original

CPU = torch.device("cpu")
DEPTHS = range(1, 9)
SIZES = ((4,), (1, 2, 4))
IN_FLIGHT = (2, 3)
BATCHES = 12  # of one trial


class Net(nn.Module):
    """A net of ``depth`` products in a row. By chance a step branches, uses an earlier value once more, writes over its
    own buffer or gives an output; values are let go at different times, so that their memory is used again."""

    def __init__(self, depth: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        chance = random.Random(seed)
        self.steps = [
            (chance.choice(["plain", "branch", "again", "over"]), chance.random() < 0.3) for _ in range(depth)
        ]
        if seed == 0:
            self.steps = [("plain", False)] * depth

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = now = x
        outputs = []
        for layer, (kind, gives) in zip(self.layers, self.steps, strict=True):
            now = layer(now)
            if kind == "branch":
                now = now.relu() + (now * 0.5).sin()
            elif kind == "again":
                now = now + first
            elif kind == "over":
                now = now.tanh_().add_(1.0)
            if gives:
                outputs.append(now * 2.0)
        return (*outputs, now)


def net(depth: int, seed: int) -> Original:
    torch.manual_seed(seed)
    return original(Net(depth, seed), {"x": torch.randn(8, WIDTH)})


def recorded_on(
    device: torch.device, one: Original, sizes: tuple[int, ...], in_flight: int = 2
) -> TorchEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "slots_on", lambda device: in_flight)
        there = TorchEngine(one.program, "fp32", device)
    there.warm_up(rows(max(sizes)))
    for size in sizes:
        there.record(rows(size))
    return there


def wrong_of(there: TorchEngine, one: Original, sizes: tuple[int, ...], seed: int) -> int:
    here, chance = TorchEngine(one.program, "fp32", CPU), random.Random(seed)
    batches = [rows(chance.choice(sizes)) for _ in range(BATCHES)]
    came = answers_in_flight(there, batches)
    return sum(differs(outputs, here.run(parts)) for outputs, parts in zip(came, batches, strict=True))
