"""The causes of a loss scale's collapse: each remedy that the message names is followed, and the training goes on."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.half_model import HalfModel, without_autocast
from halfeven.serve.finetune.training.loop.training_terms import Settings, Stopped
from torch import Tensor, nn
from torch.nn.functional import mse_loss

ROWS = 48
SETTINGS = Settings(n_epochs=30, batch_size=16, learning_rate=1e-3, max_floor_hits=3, seed=5, init_scale=4.0)


class Gain(nn.Module):
    """A product that does not fit in half: where the gradient behind it is zero, its own is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.abs() * 1e7)


class Root(nn.Module):
    """A root whose slope at zero is infinite in every precision."""

    guard = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return (x.relu() * 0 + self.guard).sqrt()


class Case:
    """Linear regression through ``parts``. ``rows``: those that are trained on."""

    def __init__(self, *parts: nn.Module, level: str = "O1") -> None:
        self.x, self.y, self.rows = torch.randn(ROWS, 4), torch.randn(ROWS, 3), torch.arange(ROWS)
        self.net = nn.Sequential(nn.Linear(4, 8), *parts, nn.Linear(8, 3))
        self.half = HalfModel(self.net, torch.float16) if level == "O2" else None

    def loop(self, settings: Settings) -> Loop:
        def loss(batch: Tensor) -> Tensor:
            there = self.rows[batch]
            answer: Any = (self.half or self.net)(self.x[there])
            return mse_loss(answer.float(), self.y[there])

        if self.half is not None:
            settings = replace(settings, opt_level="O2")
        loop = Loop(self.net, loss, len(self.rows), settings)
        loop.numbers = lambda rows: self.rows[list(rows)].tolist()
        if self.half is not None:
            loop.trial = self.half.as_if
        return loop

    def why(self, settings: Settings) -> str:
        before = {name: one.clone() for name, one in self.net.state_dict().items()}
        with pytest.raises(Stopped) as stopped:
            loop = self.loop(settings)
            list(loop.run())
            loop.finish()
        assert stopped.value.code in ("SCALE_COLLAPSE", "DIVERGED")
        assert all(torch.equal(before[name], one) for name, one in self.net.state_dict().items())
        return stopped.value.message

    def trains(self, settings: Settings) -> bool:
        loop = self.loop(settings)
        records = list(loop.run())
        loop.finish()
        return sum(record.skipped for record in records) <= len(records) / 10


def number(name: str, message: str) -> float:
    found = re.search(rf"{name} = ([\d.e+-]+)", message)
    assert found, message
    return float(found[1].rstrip("."))


def test_a_loss_that_is_too_large_for_the_floor_trains_with_the_floor_that_is_named() -> None:
    case = Case()
    case.y *= 1e8
    settings = replace(SETTINGS, scale_floor=1.0)
    message = case.why(settings)
    assert "The loss is" in message and "extreme values in the inputs or targets" in message
    named = {name: number(name, message) for name in ("scale_floor", "init_scale")}
    assert case.trains(replace(settings, **named))  # type: ignore[arg-type]


def test_targets_that_need_a_scale_below_one_train_by_default_as_they_do_in_torch() -> None:
    case = Case()
    case.y = case.y.sign() * 1e7
    records = list(case.loop(SETTINGS).run())
    assert min(record.scale for record in records) < 1 and not records[-1].skipped


def test_a_job_too_short_for_its_scale_trains_with_the_first_scale_that_is_named() -> None:
    case = Case()
    settings = replace(SETTINGS, n_epochs=2, init_scale=2.0**32)
    message = case.why(settings)
    assert "so few steps do not reach" in message
    assert case.trains(replace(settings, init_scale=number("init_scale", message)))


@pytest.mark.parametrize("spoilt", [[7], [3, 40]])
def test_rows_that_overflow_alone_are_named_and_without_them_the_others_train(spoilt: list[int]) -> None:
    case = Case()
    case.y[spoilt] = 1e14
    message = case.why(replace(SETTINGS, batch_size=ROWS))
    found = re.search(r"Only the gradients of the rows ([\d, ]+) overflow", message)
    assert found and [int(one) for one in found[1].split(", ")] == spoilt
    case.rows = case.rows[~torch.isin(case.rows, torch.tensor(spoilt))]
    assert case.trains(SETTINGS)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_module_whose_numbers_do_not_fit_in_half_is_named_and_trains_in_fp32(level: str) -> None:
    case = Case(Gain(), nn.Tanh(), level=level)
    message = case.why(SETTINGS)
    named = re.search(r'fp32_modules = \["(\d)"\]', message)
    assert named and named[1] == "1" and "train in bf16 or fp32" in message
    if case.half is None:
        without_autocast(case.net, [named[1]], "cpu")
    else:
        case.half = HalfModel(case.net, torch.float16, [named[1], "2"])
    assert case.trains(SETTINGS)


def test_where_no_single_module_helps_the_precision_that_does_is_named() -> None:
    case = Case(Gain(), nn.Tanh(), nn.Linear(8, 8), Gain(), nn.Tanh())
    message = case.why(SETTINGS)
    assert message.endswith("They are finite in bf16 and in fp32: train with precision = bf16.")
    assert case.trains(replace(SETTINGS, precision="bf16"))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_slope_that_is_infinite_in_every_precision_is_not_blamed_on_half(precision: str) -> None:
    case = Case(root := Root())
    message = case.why(replace(SETTINGS, precision=precision))
    assert "not finite in fp32 either inside of the module '1', so it is not the precision" in message
    root.guard = 1e-3
    assert case.trains(replace(SETTINGS, precision=precision))


def test_a_search_that_fails_leaves_the_collapse_as_the_reason() -> None:
    case = Case(Root())
    loop = case.loop(SETTINGS)
    inner = loop.passes.loss_of

    def loss(batch: Tensor) -> Tensor:
        if loop.learner.patience.in_a_row == SETTINGS.max_floor_hits:
            raise RuntimeError("the device is lost")
        return inner(batch)

    loop.passes.loss_of = loss
    with pytest.raises(
        Stopped, match="why they overflow was not found: RuntimeError: the device is lost"
    ) as stopped:
        list(loop.run())
    assert stopped.value.code == "SCALE_COLLAPSE"


def test_the_search_leaves_the_generators_as_they_were() -> None:
    case, state = Case(nn.Dropout(0.5), Root()), torch.empty(0)
    with pytest.raises(Stopped):
        for _ in case.loop(SETTINGS).run():
            state = torch.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
