"""A job that asks for a half precision is told which of its layers the processor trains much slower in it. The
processors are given facts."""

from collections.abc import Callable

import pytest
import torch
from halfeven.models.machine.kernel_costs import KINDS, Cost
from halfeven.serve.finetune.training.first_steps import slow_precision
from torch import nn

FAST = Cost(1.0, 1.0)
FACTS: dict[str, dict[str, Cost]] = {
    "AVX2": {"conv2d": Cost(9.0, 9.0), "lstm": Cost(None, None, "no primitive")},
    "AVX-512": {"conv2d": Cost(17.0, 9.3), "lstm": Cost(None, None, "no primitive")},
    "AVX-512 with bf16": {"conv2d": Cost(17.0, 9.3), "lstm": Cost(None, None, "no primitive")},
    "AVX-512 with FP16, and AMX": {"conv2d": Cost(1.9, 180.0), "lstm": Cost(0.8, None, "no primitive")},
}
NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(4, 4))


def costs(processor: str) -> Callable[[torch.dtype, list[str]], dict[str, Cost]]:
    def found(dtype: torch.dtype, kinds: list[str]) -> dict[str, Cost]:
        given = FACTS[processor] if dtype == torch.float16 else {}
        return {kind: given.get(kind, FAST) for kind in kinds}

    return found


@pytest.mark.parametrize("processor", FACTS)
def test_slow_convolutions_are_named_with_their_times_and_the_way_out(processor: str) -> None:
    sentence = slow_precision("fp16", NET, costs(processor))
    assert sentence is not None and f"conv2d {FACTS[processor]['conv2d'].training:.0f}. " in sentence
    assert 'precision = "auto"' in sentence and "fp16_emulated" in sentence and "linear" not in sentence


@pytest.mark.parametrize("processor", FACTS)
def test_a_layer_without_a_kernel_to_train_it_is_named(processor: str) -> None:
    sentence = slow_precision("fp16", nn.ModuleList([nn.LSTM(2, 2)]), costs(processor))
    assert sentence is not None and "lstm (no kernel: computed in FP32)" in sentence


@pytest.mark.parametrize("precision", ["bf16", "fp32", "auto", "fp16_emulated"])
def test_nothing_is_said_of_what_is_fast(precision: str) -> None:
    assert slow_precision(precision, NET, costs("AVX-512 with FP16, and AMX")) is None


def test_only_the_kinds_of_the_model_are_measured() -> None:
    asked: list[str] = []

    def measured(dtype: torch.dtype, kinds: list[str]) -> dict[str, Cost]:
        asked.extend(kinds)
        return dict.fromkeys(kinds, FAST)

    assert slow_precision("fp16", NET, measured) is None
    assert asked == ["linear", "conv2d"] and set(asked) < set(KINDS)
