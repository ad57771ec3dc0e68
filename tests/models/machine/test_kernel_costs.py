"""The cost of kernels in half is asked as they are used, in times of FP32."""

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from halfeven.models.machine import kernel_costs
from halfeven.models.machine.kernel_costs import KINDS, SLOW, Cost, kinds_of
from torch import nn


def test_every_kind_has_a_cost_on_this_processor_for_answers_and_for_training() -> None:
    """This test asks the real processor: whatever it is, a kind is computed or torch says why it is not."""
    found = kernel_costs.kernel_costs(torch.bfloat16)
    assert found.keys() == KINDS.keys()
    for cost in found.values():
        assert (cost.answer is not None and cost.training is not None) or cost.fault
        assert all(one > 0 for one in (cost.answer, cost.training) if one is not None)


def test_a_cost_is_the_shortest_of_some_runs_in_times_of_fp32s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_costs, "KINDS", {"linear": lambda: (nn.Linear(2, 2), torch.randn(3, 2))})
    # The spans of three runs each: of an answer in half and in FP32, then of a step in half and in FP32.
    spans = iter([4.0, 3.0, 6.0, 1.5, 1.0, 2.0, 9.0, 8.0, 7.0, 0.7, 0.5, 0.6])
    found = kernel_costs.kernel_costs(torch.float16, ["linear"], clock_of(spans).__next__)
    assert found == {"linear": Cost(3.0, 14.0)} and found["linear"].slow_to_train


def test_what_answers_in_half_and_does_not_train_in_it_has_no_kernel_for_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AnswersOnly(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled("cpu") and torch.is_grad_enabled():
                raise RuntimeError("could not create a primitive descriptor for the LSTM forward")
            return super().forward(input)

    monkeypatch.setattr(kernel_costs, "KINDS", {"lstm": lambda: (AnswersOnly(2, 2), torch.randn(3, 2))})
    cost = kernel_costs.kernel_costs(torch.float16, ["lstm"])["lstm"]
    assert cost.answer is not None and cost.training is None and cost.slow_to_train
    assert "primitive descriptor" in cost.fault and "training no kernel" in str(cost)


@pytest.mark.parametrize(
    ("training", "slow"), [(SLOW, False), (SLOW + 0.1, True), (None, True), (0.8, False)]
)
def test_slow_is_more_than_a_bound(training: float | None, slow: bool) -> None:
    assert Cost(1.0, training).slow_to_train is slow


def test_the_kinds_of_a_module_and_of_its_captured_program_are_the_same() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ConvTranspose2d(4, 1, 2),
        nn.Linear(2, 2),
    )
    assert kinds_of(net) == ["linear", "grouped conv2d", "depthwise conv2d", "transposed conv2d"]
    layers = nn.ModuleList([nn.LSTM(2, 2), nn.GRU(2, 2), nn.MultiheadAttention(2, 1), nn.Conv3d(1, 1, 1)])
    assert kinds_of(layers) == ["linear", "conv3d", "lstm", "gru", "attention"]
    plain = nn.Sequential(nn.Conv1d(1, 2, 1), nn.ReLU(), nn.Linear(3, 3)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(plain, (torch.randn(2, 1, 3),))
    assert kinds_of(program.module()) == kinds_of(plain) == ["linear", "conv1d"]


def clock_of(spans: Iterator[float]) -> Iterator[float]:
    """Begin and end of each span."""
    now = itertools.count(0, 1000)
    for span in spans:
        begin = float(next(now))
        yield begin
        yield begin + span
