"""FP16 storage with FP32 products: the numbers of true FP16 kernels up to the order of sums, and the same overflows."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop import amp
from halfeven.serve.finetune.training.loop.emulated_half import EmulatedHalf
from halfeven.serve.finetune.training.loop.setting_names import EMULATED
from halfeven.serve.finetune.training.loop.training_terms import GRADIENT_OVERFLOW, Settings
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

HALF_U = 2.0**-11


class First(nn.Module):
    """The first answer of a layer that gives several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (8, 6)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1, groups=1), (2, 3, 8, 8)),
    "grouped": (lambda: nn.Conv1d(4, 4, 3, groups=2), (2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 2, stride=2), (2, 3, 4, 4)),
    "gru": (lambda: First(nn.GRU(3, 5, batch_first=True)), (2, 4, 3)),
}


def gradients(net: nn.Module, x: Tensor, mode: Any) -> list[Tensor]:
    net.zero_grad()
    with mode:
        with torch.autocast("cpu", torch.float16):
            answer = net(x)
        (answer.float() ** 2).mean().backward()
    return [answer.detach(), *(one.grad.clone() for one in net.parameters() if one.grad is not None)]


@pytest.mark.parametrize("name", NETS)
def test_answers_and_gradients_are_those_of_half_kernels_within_a_few_roundings(name: str) -> None:
    make, shape = NETS[name]
    net, x = make(), torch.randn(shape)
    true, emulated = gradients(net, x, nullcontext()), gradients(net, x, EmulatedHalf())
    assert len(true) == len(emulated) == 1 + len(list(net.parameters()))
    for one, other in zip(true, emulated, strict=True):
        assert one.dtype == other.dtype
        assert float((one.float() - other.float()).abs().max()) <= 16 * HALF_U * float(one.abs().max())


def test_an_lstm_is_computed_where_the_processor_has_no_half_kernel_for_it() -> None:
    net, x = First(nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True)), torch.randn(2, 4, 3)
    answer, *grads = gradients(net, x, EmulatedHalf())
    with torch.no_grad():
        assert torch.allclose(answer.float(), net(x), atol=16 * HALF_U)
    assert len(grads) == len(list(net.parameters())) and all(bool(torch.isfinite(one).all()) for one in grads)


def test_no_product_reaches_a_half_kernel_forward_or_backward() -> None:
    seen: list[tuple[str, torch.dtype]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("convolution", "convolution_backward", "addmm", "mm"):
                seen.append((func.overloadpacket.__name__, args[0].dtype))
            return func(*args, **(kwargs or {}))

    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))
    with Seen(), EmulatedHalf():
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.randn(4, 1, 5, 5)).float().sum()
        loss.backward()
    assert {name for name, _ in seen} == {"convolution", "convolution_backward", "addmm", "mm"}
    assert {dtype for _, dtype in seen} == {torch.float32}


def test_the_scale_falls_where_gradients_overflow_half_and_grows_afterwards() -> None:
    torch.manual_seed(5)
    net, x = (
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)),
        torch.randn(64, 1, 8),
    )
    settings = Settings(
        n_epochs=6,
        batch_size=8,
        learning_rate=1e-3,
        precision=EMULATED,
        init_scale=2.0**30,
        growth_interval=4,
    )
    records = list(amp.train(net, lambda rows: mse_loss(net(x[rows]).float(), x[rows, :, 0]), 64, settings))
    causes = [record.cause for record in records]
    assert causes[0] == GRADIENT_OVERFLOW and None in causes
    scales = [record.scale for record in records]
    assert min(scales) < scales[0] and scales[-1] > min(scales)
