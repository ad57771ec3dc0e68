"""An LSTM trains in half on a processor: what oneDNN has no half kernel for computes in FP32, the rest in half."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop import amp, recurrent
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


@pytest.mark.slow
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


def test_only_the_lstm_computes_in_fp32_where_it_cannot_be_trained_in_half() -> None:
    net = Net()
    with torch.autocast("cpu", torch.bfloat16), recurrent.RecurrentInFp32(torch.bfloat16, never):
        found = net(torch.randn(4, 5, 3))
    assert net.seen == {"lstm": torch.float32, "last": torch.bfloat16}
    found.float().sum().backward()
    assert all(one.grad is not None for one in net.parameters())


def test_an_lstm_whose_half_input_torch_computes_goes_torchs_own_way() -> None:
    layer, half = nn.LSTM(3, 6), torch.randn(4, 5, 3).half()
    with torch.autocast("cpu", torch.float16):
        expected, _ = layer(half)
        with recurrent.RecurrentInFp32(torch.float16, always):
            found, _ = layer(half)
    assert found.dtype == torch.float16 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("net", "kind", "autocasts"),
    [(nn.Linear(3, 3), "cpu", True), (nn.LSTM(3, 3), "cuda", True), (nn.LSTM(3, 3), "cpu", False)],
    ids=["no recurrent layer", "a CUDA device", "no autocast"],
)
def test_nothing_surrounds_what_computes_by_itself(net: nn.Module, kind: str, autocasts: bool) -> None:
    assert isinstance(recurrent.recurrent_context(net, kind, torch.float16, autocasts), nullcontext)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 6),
    "two layers in both directions": lambda: nn.LSTM(3, 6, 2, bidirectional=True, dropout=0.1),
    "rows first, without biases": lambda: nn.LSTM(3, 6, batch_first=True, bias=False),
    "projected": lambda: nn.LSTM(3, 6, proj_size=2),
    "gru": lambda: nn.GRU(3, 6, 2, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 6, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("packed", [False, True], ids=["even", "packed"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_every_recurrent_layer_trains_under_autocast_on_this_processor(
    name: str, packed: bool, dtype: torch.dtype
) -> None:
    layer, x = LAYERS[name](), torch.randn(5, 4, 3)
    given: Any = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2, 2])) if packed else x
    with torch.autocast("cpu", dtype), recurrent.recurrent_context(layer, "cpu", dtype, True):
        states = layer(given)[0]
    (states.data if packed else states).float().sum().backward()
    assert all(one.grad is not None and torch.isfinite(one.grad).all() for one in layer.parameters())


def test_a_processor_that_answers_in_half_and_does_not_train_in_it_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN with AVX512-FP16 is so: the kernel of the answer exists, that of training does not."""
    monkeypatch.setattr(recurrent, "_known", {})

    def kernel(x: Tensor) -> tuple[Tensor]:
        if torch.is_grad_enabled() and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor")
        return (x * 2,)

    with torch.no_grad():
        assert not recurrent.trains_here(kernel, ((torch.zeros(2, 3),), {}), torch.float16)


def test_an_error_of_the_callers_own_is_left_to_be_raised() -> None:
    around = recurrent.RecurrentInFp32(torch.float16)
    with torch.autocast("cpu", torch.float16), around, pytest.raises(RuntimeError, match="input"):
        nn.LSTM(3, 6)(torch.zeros(4, 5, 2))


def test_a_kind_of_call_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(recurrent, "_known", {})
    # The layer runs in FP32 alone: not every processor has the call in half.
    monkeypatch.setattr(recurrent, "_runs", lambda _, call, half: tried.append(call) if half else True)
    layer = nn.LSTM(3, 6)
    with torch.autocast("cpu", torch.bfloat16), recurrent.RecurrentInFp32(torch.bfloat16):
        for rows, length in ((4, 5), (2, 7), (1, 1)):
            layer(torch.zeros(length, rows, 3))
    assert len(tried) == 1


def never(*_: Any) -> bool:
    return False


def always(*_: Any) -> bool:
    return True
