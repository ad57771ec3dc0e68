"""The precision of a job is measured: a much slower one is left out early, and among the fast ones the most exact of
the fastest is taken. The processors are given facts: a clock that the fake net moves."""

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import BatchLoop
from halfeven.serve.finetune.training.loop.loop_state import copied
from halfeven.serve.finetune.training.loop.passes import whole
from halfeven.serve.finetune.training.loop.setting_names import EXACT_FIRST, chosen_precision
from halfeven.serve.finetune.training.loop.training_terms import Settings, named_tensors
from halfeven.serve.finetune.training.precision_test import (
    GROWTH,
    MOST_TIMES,
    PrecisionTest,
    Timed,
    timed_steps,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

# Times FP32's, of a convolution's training step.
PROCESSORS = {
    "AVX2": {"fp32": 1.0, "fp16": 9.0, "bf16": 8.0},
    "AVX-512": {"fp32": 1.0, "fp16": 11.0, "bf16": 1.9},
    "AVX-512 with bf16": {"fp32": 1.0, "fp16": 11.0, "bf16": 0.7},
    "AVX-512 with FP16, and AMX": {"fp32": 1.0, "fp16": 180.0, "bf16": 0.85},
    "a GPU's": {"fp32": 1.0, "fp16": 0.4, "bf16": 0.4},
}
CHOSEN = dict(zip(PROCESSORS, ("fp32", "fp32", "bf16", "bf16", "fp16"), strict=True))
ROW_S = 0.01  # of one row in FP32


class Fake(nn.Module):
    """A convolution that takes the time of a given processor."""

    def __init__(self, times: dict[str, float]) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv1d(4, 2, 1), nn.BatchNorm1d(2)
        self.times, self.now, self.work, self.rows = times, 0.0, dict.fromkeys(times, 0.0), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        half = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        precision = half[torch.get_autocast_dtype("cpu")] if torch.is_autocast_enabled("cpu") else "fp32"
        took = ROW_S * len(x) * self.times[precision]
        self.now, self.work[precision] = self.now + took, self.work[precision] + took
        self.rows.append(len(x))
        return self.norm(self.layer(x[:, :, None])).float()[:, :, 0]


ROWS = torch.randn(64, 4)
USUAL = Settings(batch_size=32)


def measuring(net: Fake, settings: Settings = USUAL, steps: int = 300, device: str = "cpu") -> PrecisionTest:

    def loop(asked: Settings, rows: int) -> BatchLoop:
        return Loop(net, lambda batch: mse_loss(net(ROWS[batch]), ROWS[batch, :2]), rows, asked)

    def clock() -> float:
        return net.now

    return PrecisionTest(net, loop, settings, steps, device, clock=clock, work_clock=clock)


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


def test_a_half_model_is_given_a_half_where_nothing_could_be_timed() -> None:
    assert chosen_precision({}, ("fp16", "bf16")) == "fp16"


@pytest.mark.parametrize("processor", PROCESSORS)
def test_on_each_processor_the_fastest_is_found(processor: str) -> None:
    net = Fake(PROCESSORS[processor])
    found = measuring(net).timed()
    assert chosen_precision(found.seconds) == CHOSEN[processor]
    slow = {name for name, times in PROCESSORS[processor].items() if times > MOST_TIMES}
    assert {
        one.precision for one in found.left_out
    } == slow and found.seconds.keys() == net.times.keys() - slow
    for name, seconds in found.seconds.items():
        assert seconds == pytest.approx(32 * ROW_S * net.times[name])


@pytest.mark.parametrize("times", [10.0, 180.0, 1e4])
@pytest.mark.parametrize("steps", [10, 300, 100_000])
def test_the_choice_costs_few_steps_whatever_a_slow_precision_costs(times: float, steps: int) -> None:
    """The first rows of a slow precision are the fewest, so that it is left out before it meets many."""
    net = Fake({"fp32": 1.0, "fp16": times, "bf16": 0.9})
    measuring(net, steps=steps).timed()
    step_s = 32 * ROW_S
    assert net.work["fp16"] == pytest.approx(2 * 2 * ROW_S * times), "a batch of two rows, twice"
    assert net.work["fp32"] + net.work["bf16"] <= (0.3 * steps + 10) * step_s


def test_a_slow_precision_is_ended_in_the_middle_of_its_step() -> None:
    """The module has many operators, of which each takes long: only a few are run."""
    net = Fake({"fp32": 1.0, "fp16": 100.0, "bf16": 1.0})
    calls: list[str] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
                net.now += 100.0 if half else 1.0
                calls.append("fp16" if half else "other")
                x = part(x)
            return x.float()

    deep, x = Deep(), torch.randn(8, 4)

    def loop(asked: Settings, rows: int) -> BatchLoop:
        return Loop(deep, lambda batch: mse_loss(deep(x[batch]), x[batch]), rows, asked)

    def clock() -> float:
        return net.now

    test = PrecisionTest(deep, loop, Settings(batch_size=8), 300, "cpu", clock=clock, work_clock=clock)
    (slow,) = test.timed().left_out
    assert slow.precision == "fp16" and calls.count("fp16") == 2 * 2, (
        "twice, and the second operator of each exceeds the bound"
    )


def test_a_precision_that_is_slow_behind_its_backward_pass_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, unscale = Fake({"fp32": 1.0, "fp16": 1.0, "bf16": 1.0}), torch.amp.GradScaler.unscale_

    def slow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        unscale(scaler, optimizer)
        net.now += 1000.0 if scaler.is_enabled() else 0.0

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", slow)
    found = measuring(net).timed()
    assert [one.precision for one in found.left_out] == ["fp16"] and "fp16" not in found.seconds


def test_what_was_trained_for_the_test_is_undone_and_the_generators_are_as_before() -> None:
    net = Fake(PROCESSORS["AVX-512 with bf16"])
    before = {name: copied(one) for name, one in named_tensors(net).items()}
    state = torch.get_rng_state()
    measuring(net).timed()
    assert all(torch.equal(one, before[name]) for name, one in named_tensors(net).items())
    assert torch.equal(torch.get_rng_state(), state) and all(one.grad is None for one in net.parameters())


def test_a_short_job_has_fewer_rounds() -> None:
    rows = {}
    for steps in (10, 10_000):
        net = Fake({"fp32": 1.0, "fp16": 1.0, "bf16": 1.0})
        measuring(net, steps=steps).timed()
        rows[steps] = net.rows.count(32)
    assert rows[10] < rows[10_000] / 2


def test_another_device_is_not_watched_and_every_precision_is_timed() -> None:
    net = Fake({"fp32": 1.0, "fp16": 50.0, "bf16": 50.0})
    found = measuring(net, device="cuda").timed()
    assert found.seconds.keys() == set(EXACT_FIRST) and not found.left_out and set(net.rows) == {32}


def test_a_precision_that_does_not_run_is_left_out_without_a_word() -> None:
    class NoHalf(Fake):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("could not create a primitive descriptor")
            return super().forward(x)

    found = measuring(NoHalf(PROCESSORS["AVX2"])).timed()
    assert found.seconds.keys() == {"fp32"} and found.left_out == []


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 9, 64])
def test_the_last_rows_that_are_tried_are_those_of_a_batch(batch_size: int) -> None:
    net = Fake({"fp32": 1.0, "fp16": 1.0, "bf16": 1.0})
    net.norm = nn.Identity()  # type: ignore[assignment]
    measuring(net, Settings(batch_size=batch_size)).timed()
    sizes = sorted({*net.rows} - {2})
    assert sizes[-1:] == ([batch_size] if batch_size != 2 else [])
    assert all(later <= GROWTH * earlier for earlier, later in zip([2, *sizes], sizes, strict=False))


def test_the_facts_of_an_event_name_what_was_left_out_and_what_the_choice_cost() -> None:
    net = Fake(PROCESSORS["AVX2"])
    facts = measuring(net).timed().facts()
    assert {one["precision"] for one in facts["left_out"]} == {"fp16", "bf16"}
    assert facts["took_seconds"] == pytest.approx(net.now) and isinstance(Timed().facts()["seconds"], dict)


def test_a_module_by_itself_is_timed_without_what_is_much_slower() -> None:
    net = Fake({"fp32": 3.0, "fp16": 1.0, "bf16": 2.0})
    found = timed_steps(
        net,
        lambda batch: mse_loss(net(ROWS[batch]), ROWS[batch, :2]),
        whole,
        64,
        USUAL,
        "cpu",
        lambda: net.now,
        lambda: net.now,
    )
    assert found == pytest.approx({"fp32": 96 * ROW_S, "fp16": 32 * ROW_S, "bf16": 64 * ROW_S})
