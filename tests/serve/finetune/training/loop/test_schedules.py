"""The learning rate by the name of its schedule: its values over a training, and the same values after a resumption."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from halfeven.serve.finetune.training.loop.learner import scheduler_of, warm_up_steps
from halfeven.serve.finetune.training.loop.setting_names import SCHEDULES
from halfeven.serve.finetune.training.loop.training_terms import Settings
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

STEPS, WARM_UP = 120, 20
GAMMA, POWER, PERIOD = 0.2, 3.0, 0.25
SETTINGS = Settings(
    learning_rate=0.01, warmup_ratio=WARM_UP / STEPS, schedule_gamma=GAMMA, schedule_power=POWER,
    schedule_period=PERIOD,
)  # fmt: skip
# The share of the rate at a point of the falling part, from 0 to 1, as the definitions have it.
SHARES: dict[str, Callable[[float], float]] = {
    "cosine": lambda at: 0.5 + 0.5 * math.cos(math.pi * at),
    "constant": lambda at: 1.0,
    "linear": lambda at: 1 - at,
    "polynomial": lambda at: (1 - at) ** POWER,
    "step": lambda at: GAMMA ** math.floor(at / PERIOD + 1e-9),
    "exponential": lambda at: GAMMA**at,
    "cosine_restarts": lambda at: 0.5 + 0.5 * math.cos(math.pi * math.fmod(at + 1e-12, PERIOD) / PERIOD),
}


def scheduler(name: str, settings: Settings = SETTINGS) -> LRScheduler:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), settings.learning_rate)
    return scheduler_of(optimizer, replace(settings, schedule=name), STEPS)


def rates(found: LRScheduler, count: int) -> list[float]:
    """The rates of so many steps, of which the scheduler is told."""
    values = []
    for _ in range(count):
        values.append(float(found.get_last_lr()[0]))
        found.optimizer.step()
        found.step()
    return values


@pytest.mark.parametrize("name", sorted(SHARES))
def test_a_schedule_warms_up_and_then_falls_as_its_definition_says(name: str) -> None:
    expected = [(1 + step * (1 - 1 / WARM_UP)) / WARM_UP for step in range(WARM_UP)]
    expected += [SHARES[name]((step - WARM_UP) / (STEPS - WARM_UP)) for step in range(WARM_UP, STEPS)]
    assert rates(scheduler(name), STEPS) == pytest.approx([0.01 * share for share in expected], abs=1e-9)


def test_one_cycle_rises_once_and_ends_near_nothing() -> None:
    found = rates(scheduler("one_cycle", replace(SETTINGS, warmup_ratio=0.3)), STEPS)
    top = found.index(max(found))
    assert max(found) == pytest.approx(0.01, rel=1e-2) and abs(top - 0.3 * STEPS) <= 1
    assert found[:top] == sorted(found[:top]) and found[top:] == sorted(found[top:], reverse=True)
    assert found[-1] < 1e-6


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("at", [1, WARM_UP - 1, WARM_UP, WARM_UP + 1, 77])
def test_a_schedule_that_is_put_back_from_json_goes_on_bit_for_bit(name: str, at: int) -> None:
    first, second = scheduler(name), scheduler(name)
    rates(first, at)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in first.optimizer.param_groups
    ]
    state = json.loads(json.dumps({"scheduler": first.state_dict(), "groups": groups}))
    for group, kept in zip(second.optimizer.param_groups, state["groups"], strict=True):
        group.update(kept, betas=tuple(kept["betas"]))
    second.load_state_dict(state["scheduler"])
    assert rates(first, STEPS - at) == rates(second, STEPS - at)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 3, 30])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_lasts_over_a_training_of_any_length(name: str, ratio: float, steps: int) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), 0.01)
    found = scheduler_of(optimizer, replace(SETTINGS, schedule=name, warmup_ratio=ratio), steps)
    values = rates(found, steps)
    assert all(0 <= value <= 0.01 + 1e-12 for value in values) and max(values) > 0


def test_a_warm_up_of_one_step_is_none_and_one_never_takes_all_steps() -> None:
    found = [warm_up_steps(replace(SETTINGS, warmup_ratio=0.05), steps) for steps in (1, 29, 40, 1000)]
    assert found == [0, 0, 2, 50]
    assert warm_up_steps(replace(SETTINGS, warmup_ratio=0.9), 3) == 2
