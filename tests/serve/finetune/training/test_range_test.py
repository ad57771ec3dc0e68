"""The learning rate that a short range test finds: worth nearly what a sweep is worth, without a trace of the test."""

import math
from dataclasses import replace

import pytest
import torch
from halfeven.serve.finetune.training.chosen import RATES, chosen_rate, range_test
from halfeven.serve.finetune.training.loop import amp
from halfeven.serve.finetune.training.loop.loop_state import copied, put_into
from halfeven.serve.finetune.training.loop.passes import whole
from halfeven.serve.finetune.training.loop.setting_names import USUAL_LEARNING_RATE
from halfeven.serve.finetune.training.loop.training_terms import Settings, Stopped, named_tensors
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.slow import slow_but

ROWS = 256
SETTINGS = Settings(n_epochs=12, batch_size=16, precision="fp32", seed=5)


class Shifted:
    """A net that has to learn another linear map; ``size``: of its inputs, on which the best rate depends."""

    def __init__(self, size: float) -> None:
        self.inputs = size * torch.randn(2 * ROWS, 6)
        self.targets = self.inputs @ torch.randn(6, 2) / size
        self.net = nn.Sequential(
            nn.Linear(6, 32), nn.BatchNorm1d(32) if size == 1 else nn.Identity(), nn.Linear(32, 2)
        )
        self.start = {name: copied(one) for name, one in named_tensors(self.net).items()}

    def loss(self, rows: Tensor) -> Tensor:
        return mse_loss(self.net(self.inputs[rows]).float(), self.targets[rows])

    def evaluated(self, rows: Tensor) -> float:
        self.net.eval()
        with torch.no_grad():
            found = self.loss(rows).item()
        self.net.train()
        return found

    def unseen(self) -> float:
        return self.evaluated(torch.arange(ROWS, 2 * ROWS))

    def after(self, rate: float) -> float:
        """The loss on unseen rows after the whole training at this rate."""
        put_into(self.net, self.start)
        try:
            list(amp.train(self.net, self.loss, ROWS, replace(SETTINGS, learning_rate=rate)))
        except Stopped:
            return math.inf
        return self.unseen()

    def tested(self) -> float:
        put_into(self.net, self.start)
        counts: list[int] = []
        rows = whole, ROWS, SETTINGS, "cpu", self.evaluated, counts.append
        found = range_test(self.net, self.loss, *rows).rate
        assert counts == list(range(len(RATES)))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("size", slow_but({1.0}, [0.1, 1.0, 30.0]))
def test_the_rate_closes_four_fifths_of_the_gap_that_a_sweep_closes(size: float) -> None:
    task = Shifted(size)
    before, rate = task.unseen(), task.tested()
    sweep = {one: task.after(one) for one in RATES}
    assert (before - sweep[rate]) / (before - min(sweep.values())) >= 0.8, (rate, sweep)


@pytest.mark.slow
def test_the_test_leaves_weights_buffers_and_generators_as_they_were_and_repeats() -> None:
    task = Shifted(1.0)
    generator = torch.get_rng_state()
    rates = [task.tested(), task.tested()]
    now = named_tensors(task.net)
    assert all(torch.equal(now[name], one) for name, one in task.start.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert rates[0] == rates[1]


def test_of_rates_that_gain_nearly_as_much_the_smallest_is_taken() -> None:
    assert chosen_rate(2.0, {1e-4: 1.9, 1e-3: 1.05, 1e-2: 1.0, 3e-2: None}) == 1e-3
    assert chosen_rate(2.0, {1e-4: 1.9, 1e-3: 1.5, 1e-2: 1.0}) == 1e-2
    assert chosen_rate(2.0, {1e-4: 2.0, 1e-3: 2.5, 1e-2: None}) == USUAL_LEARNING_RATE
    assert chosen_rate(2.0, {}) == USUAL_LEARNING_RATE


def test_a_batch_is_divided_by_the_numbers_that_its_rows_have_in_the_job() -> None:
    """The shares of targets that count are looked up by these numbers."""
    task, divided, learnt = Shifted(1.0), set[int](), set[int]()

    def parts_of(batch: Tensor) -> list[Tensor]:
        divided.update(batch.tolist())
        return [batch]

    def loss_of(rows: Tensor) -> Tensor:
        learnt.update(rows.tolist())
        return task.loss(rows)

    range_test(task.net, loss_of, parts_of, 40, SETTINGS, "cpu", task.evaluated)
    assert divided == learnt and len(learnt) == 30 and max(learnt) > 30


def test_too_few_rows_are_not_tried() -> None:
    task = Shifted(1.0)
    found = range_test(task.net, task.loss, whole, 3, SETTINGS, "cpu", task.evaluated)
    assert (found.rate, found.losses) == (USUAL_LEARNING_RATE, {})
