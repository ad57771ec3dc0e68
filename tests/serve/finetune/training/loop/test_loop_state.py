"""The state of a training, through JSON and into a new loop: its next steps are bit for bit those of the old one."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.serve.finetune.training.loop import loop_state, seeding
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.seeding import seed_everything
from halfeven.serve.finetune.training.loop.training_terms import Settings
from torch import Tensor, nn
from torch.nn.functional import mse_loss

# Overflows at first and whenever the scale grows; a row that is left out; clipping, averages, the cosine schedule.
SETTINGS = Settings(
    n_epochs=8, batch_size=8, precision="fp16", init_scale=2.0**20, growth_interval=2, clip_norm=0.1, seed=3,
    bad_rows="quarantine", learning_rate=0.01, ema_decay=0.9,
)  # fmt: skip
INPUTS, TARGETS = torch.randn(64, 5), torch.randn(64, 3)
INPUTS[11] = 1e30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        self.register_buffer("seen", torch.zeros(0), persistent=False)  # of another shape after each forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, torch.ones(1)])[-3:]
        noise = 0.01 * (random.random() + float(np.random.rand()) + len(self.seen))
        return self.layers(x) + noise


def loop_of(net: Net) -> Loop:
    return Loop(net, lambda rows: mse_loss(net(INPUTS[rows]).float(), TARGETS[rows]), 64, SETTINGS)


def draw_from_all() -> None:
    torch.rand(3)
    np.random.rand()
    random.random()


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def gone_on(steps: int) -> tuple[Loop, Loop]:
    """A loop after so many steps, and one that was made from its state; the generators are those of the state."""
    torch.manual_seed(1)
    first = loop_of(new_net())
    records = first.run()
    for _ in range(steps):
        next(records)
    tensors = loop_state.tensors_of(first)
    numbers = json.loads(json.dumps(loop_state.numbers_of(first)))
    for _ in range(5):  # and the generators move on
        draw_from_all()
    second = loop_of(new_net())
    loop_state.put_back(second, tensors, numbers)
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 5, 11, 30])
def test_the_steps_of_a_loop_that_goes_on_are_those_of_the_first(steps: int) -> None:
    first, second = gone_on(steps)
    with seeding.generators_untouched():
        other = [str(record) for record in second.run()]  # as text: NaN equals no NaN
    assert [str(record) for record in first.run()] == other and len(other) == 64 - steps
    assert_same(first, second)


def test_every_part_of_the_state_is_put_back() -> None:
    first, second = gone_on(30)
    first.learner.patience.in_a_row = 2
    second = loop_of(new_net())
    loop_state.put_back(second, loop_state.tensors_of(first), loop_state.numbers_of(first))
    assert first.quarantine.rows.tolist() == [11] and second.quarantine.rows.tolist() == [11]
    assert (second.learner.patience.in_a_row, second.learner.patience.taken) == (
        2,
        first.learner.patience.taken,
    )
    assert_same(first, second)


def assert_same(first: Loop, second: Loop) -> None:
    one, other = loop_state.tensors_of(first), loop_state.tensors_of(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert loop_state.numbers_of(first) == loop_state.numbers_of(second)


class OwnOptimizer(torch.optim.SGD):
    """SGD with tensors and infinity in its groups, one of them from the first step on, and a list in its state."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", torch.zeros(())) + 0.1
            for one in group["params"]:
                if one.grad is not None:
                    kept = self.state[one].setdefault("kept", [torch.zeros_like(one)])
                    kept[0] += one.grad
                    one.grad += (kept[0] * group["taken"]).clamp(max=group["growth_rate"])
        super().step()


def own_loop(net: Net) -> Loop:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        own = ({**group, "lr": torch.tensor(group["lr"]), "growth_rate": math.inf} for group in groups)
        return OwnOptimizer(own, lr=0.0)

    settings = replace(SETTINGS, make_optimizer=make, n_epochs=2, init_scale=1.0)
    return Loop(net, lambda rows: mse_loss(net(INPUTS[rows]).float(), TARGETS[rows]), 64, settings)


def test_tensors_and_infinity_in_the_groups_of_an_own_optimizer_are_put_back() -> None:
    first, second = own_loop(new_net()), own_loop(new_net())
    records = first.run()
    for _ in range(5):
        next(records)
    numbers = json.loads(json.dumps(loop_state.numbers_of(first)))
    loop_state.put_back(second, loop_state.tensors_of(first), numbers)
    with seeding.generators_untouched():
        other = [str(record) for record in second.run()]
    assert [str(record) for record in records] == other and len(other) == 11
    assert_same(first, second)


def test_the_state_of_another_module_is_refused() -> None:
    first, _ = gone_on(2)
    other = Loop(
        net := nn.Linear(5, 3), lambda rows: net(INPUTS[rows]).sum(), 64, replace(SETTINGS, n_epochs=1)
    )
    with pytest.raises(ValueError, match="other tensors"):
        loop_state.put_back(other, loop_state.tensors_of(first), loop_state.numbers_of(first))


@pytest.mark.parametrize("draw", [lambda: torch.rand(3).tolist(), random.random, np.random.rand])
def test_what_is_drawn_aside_is_not_missed_afterwards(draw: Callable[[], object]) -> None:
    seed_everything(4)
    expected = draw()
    seed_everything(4)
    with seeding.generators_untouched():
        draw_from_all()
    assert draw() == expected
