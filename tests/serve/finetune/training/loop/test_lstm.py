"""An LSTM trains in half on a processor: what oneDNN has no half kernel for computes in FP32, the rest in half."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop import amp, lstm
from halfeven.serve.finetune.training.loop.training_terms import Settings
from torch import Tensor, nn
from torch.nn.functional import mse_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, 2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(12, 2)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        found = self.last(states[:, -1])
        self.seen = {"lstm": states.dtype, "last": found.dtype}
        return found


def as_program(net: nn.Module) -> nn.Module:
    free = {0: torch.export.Dim.DYNAMIC(min=1, max=64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what its LSTM keeps beside its parameters
        program = torch.export.export(net.eval(), (torch.randn(4, 5, 3),), dynamic_shapes=(free,))
    module: Any = program.module(check_guards=False)
    module._forward_pre_hooks_with_kwargs.clear()
    module._forward_pre_hooks.clear()
    return module


@pytest.mark.parametrize("form", [lambda net: net, as_program], ids=["module", "program"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_net_with_an_lstm_learns_in_half(form: Callable[[nn.Module], nn.Module], precision: str) -> None:
    inputs = torch.randn(64, 5, 3)
    targets = inputs.sum(1)[:, :2]
    net = form(Net())
    before = {name: one.clone() for name, one in net.named_parameters()}
    settings = Settings(n_epochs=30, batch_size=16, learning_rate=0.02, precision=precision, seed=3)
    loop = amp.train(net, lambda rows: mse_loss(net(inputs[rows]).float(), targets[rows]), 64, settings)
    losses = [record.loss for record in loop if record.cause is None]
    assert losses[-1] < losses[0] / 2
    assert all(not torch.equal(one, before[name]) for name, one in net.named_parameters())


def test_only_the_lstm_computes_in_fp32_where_it_has_no_half_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm, "computes_lstm", lambda dtype: False)
    net = Net()
    with torch.autocast("cpu", torch.bfloat16), lstm.lstm_context(net, "cpu", torch.bfloat16, True):
        found = net(torch.randn(4, 5, 3))
    assert net.seen == {"lstm": torch.float32, "last": torch.bfloat16}
    found.float().sum().backward()
    assert all(one.grad is not None for one in net.parameters())


def test_an_lstm_whose_input_is_half_already_goes_torchs_own_way() -> None:
    layer, half = nn.LSTM(3, 6), torch.randn(4, 5, 3).half()
    with torch.autocast("cpu", torch.float16):
        expected, _ = layer(half)
        with lstm.LstmInFp32():
            found, _ = layer(half)
    assert found.dtype == torch.float16 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("net", "kind", "autocasts"),
    [(nn.GRU(3, 3), "cpu", True), (nn.LSTM(3, 3), "cuda", True), (nn.LSTM(3, 3), "cpu", False)],
    ids=["no LSTM", "a CUDA device", "no autocast"],
)
def test_nothing_surrounds_what_computes_by_itself(net: nn.Module, kind: str, autocasts: bool) -> None:
    assert isinstance(lstm.lstm_context(net, kind, torch.float16, autocasts), nullcontext)


def test_an_lstm_that_the_processor_computes_in_half_stays_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm, "computes_lstm", lambda dtype: True)
    assert isinstance(lstm.lstm_context(nn.LSTM(3, 3), "cpu", torch.float16, True), nullcontext)
