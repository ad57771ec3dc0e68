"""The precision that was measured to be the fastest; the more exact one where the times are nearly the same."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from halfeven.serve.finetune.training.loop.loop_state import copied
from halfeven.serve.finetune.training.loop.passes import whole
from halfeven.serve.finetune.training.loop.patience import named_tensors
from halfeven.serve.finetune.training.loop.training_terms import Settings
from halfeven.serve.finetune.training.precision_test import ROUNDS, chosen_precision, timed_steps
from torch import Tensor, nn
from torch.nn.functional import mse_loss


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"fp32": 1.0, "fp16": 3.3, "bf16": 2.0}, "fp32"),
        ({"fp32": 3.0, "fp16": 1.0, "bf16": 1.0}, "fp16"),
        ({"fp32": 3.0, "fp16": 1.2, "bf16": 1.0}, "bf16"),
        ({"fp32": 1.02, "fp16": 1.0}, "fp32"),
        ({"fp32": 1.06, "fp16": 1.0}, "fp16"),
        ({}, "fp32"),
    ],
)
def test_the_fastest_is_taken_and_among_equals_the_most_exact(seconds: dict[str, float], chosen: str) -> None:
    assert chosen_precision(seconds) == chosen


def test_each_precision_is_timed_in_turn_and_the_shortest_step_counts() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), torch.randn(32, 4)
    before = {name: copied(one) for name, one in named_tensors(net).items()}

    def loss(rows: Tensor) -> Tensor:
        return mse_loss(net(x[rows]).float(), x[rows, :2])

    ticks = clock()
    found = timed_steps(net, loss, whole, 32, Settings(batch_size=8), "cpu", lambda: next(ticks))
    assert found == pytest.approx({"fp32": 3.0, "fp16": 1.0, "bf16": 2.0})
    assert all(torch.equal(one, before[name]) for name, one in named_tensors(net).items())


def clock() -> Iterator[float]:
    """Begin and end of each step: of fp32 3 s, of fp16 1 s, of bf16 2 s at best. No end of the first round is read."""
    now = 0.0
    for turn in itertools.count():
        for seconds in (3.0, 1.0, 2.0):
            yield now
            now += seconds + (turn != ROUNDS // 2)
            if turn:
                yield now
