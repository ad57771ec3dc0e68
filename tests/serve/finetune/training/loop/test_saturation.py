"""A sigmoid or softmax before the loss is computed in FP32; one elsewhere is left as torch has it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop import amp
from halfeven.serve.finetune.training.loop.half_model import HalfModel
from halfeven.serve.finetune.training.loop.passes import autocast_of
from halfeven.serve.finetune.training.loop.saturation import Saturation
from halfeven.serve.finetune.training.loop.training_terms import DTYPES, Settings, Stopped
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.slow import slow_but

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.Sigmoid(),
    "squeezed": lambda scores: torch.sigmoid(scores)[:, :1].squeeze(1),
    "method": lambda scores: scores.sigmoid().reshape(-1),
    "softmax": lambda scores: scores.softmax(-1),
    "functional softmax": lambda scores: functional.softmax(scores, dim=-1).unsqueeze(0),
    "log softmax": lambda scores: functional.log_softmax(scores, -1),
    "its logarithm": lambda scores: torch.log(scores.softmax(-1) + 1e-9),
    "clamped": lambda scores: torch.clamp(torch.sigmoid(scores), 1e-7, 1 - 1e-7),
    "two classes": lambda scores: torch.stack([1 - scores.sigmoid(), scores.sigmoid()], -1),
    "one of several": lambda scores: scores.sigmoid().chunk(2, -1)[1],
    "either of two": lambda scores: 1 - (1 - scores.sigmoid()) * (1 - (scores / 2).sigmoid()),
    "of the right class": lambda scores: scores.softmax(-1).gather(1, torch.zeros(5, 1, dtype=torch.int64)),
    "hand-written sigmoid": lambda scores: torch.log(1 / (1 + torch.exp(-scores))),
    "hand-written softmax": lambda scores: (
        torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
    ).log(),
    "tanh": lambda scores: torch.log((torch.tanh(scores) + 1) / 2 + 1e-9),
    "in place": nn.Hardsigmoid(inplace=True),
    "in place, by name": lambda scores: torch.sigmoid_(input=scores * 1),
    "contiguous before": lambda scores: scores.sigmoid().contiguous(),
    "cast to its own type": lambda scores: scores.softmax(-1).to(scores.dtype).flatten(),
    "cast twice": lambda scores: torch.log(torch.exp(scores).float().sum(-1).float()),
    "of softplus": lambda scores: torch.log1p(1e-6 - torch.exp(-functional.softplus(scores))),
}


def shares_left_over(scores: Tensor) -> Tensor:
    left = (share := scores.sigmoid())
    for _ in range(300):  # of a stick that is broken again and again: longer than Python's stack
        left = left * (1 - share / 300)
    return left.log()


ENDS["a long chain"] = shares_left_over


class Turned(torch.autograd.Function):
    """A sigmoid that turns the gradient around."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(found := scores.sigmoid())
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return -grads[0] * found * (1 - found)


class Ending(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(4, 6), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layer(x))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_emulated"])
@pytest.mark.parametrize("end", ENDS)
def test_what_saturates_before_the_loss_is_computed_in_fp32_of_the_half_scores(
    end: str, precision: str
) -> None:
    net, x = Ending(ENDS[end]), 8 * torch.randn(5, 4)
    with autocast_of(settings := Settings(precision=precision), "cpu", net):
        scores = net.layer(x)
        found = net(x).float()
    assert scores.dtype == DTYPES[settings.precision] and found.requires_grad
    assert torch.equal(found, ENDS[end](scores.float()))


def test_a_captured_program_and_a_half_model_are_seen_through_too() -> None:
    net, x = Ending(nn.Sigmoid()), 8 * torch.randn(5, 4)
    program = torch.export.export(net, (x,)).module()
    with autocast_of(Settings(), "cpu", net):
        expected = net.layer(x).float().sigmoid()
        assert torch.equal(program(x).float(), expected)
    for named in ([], ["end"]):
        half = HalfModel(net, torch.float16, named)
        with autocast_of(Settings(opt_level="O2"), "cpu", net):
            answer: Tensor = half(x)  # type: ignore[assignment]
            assert answer.dtype == torch.float16
            answer = answer.float()
        torch.testing.assert_close(answer, expected, rtol=1e-3, atol=0)
        assert len(answer.unique()) == len(expected.unique()), "one near 1 is not 1"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_tanh_is_computed_in_fp32_where_its_inverse_takes_it_and_else_left_alone(precision: str) -> None:
    net, x = Ending(torch.tanh), 8 * torch.randn(5, 4)
    with autocast_of(Settings(precision=precision), "cpu", net, known := Saturation()):
        assert torch.equal(net(x).float(), torch.tanh(net.layer(x)).float())
    assert known.needed is False
    with autocast_of(Settings(precision=precision), "cpu", net):
        found = torch.atanh(net(x).float().clamp(-1 + 1e-6, 1 - 1e-6))
        expected = torch.atanh(net.layer(x).float().tanh().clamp(-1 + 1e-6, 1 - 1e-6))
    assert torch.equal(found, expected)


def test_a_sigmoid_in_place_is_seen_and_one_that_was_written_over_is_not_computed_again() -> None:
    net, x = Ending(lambda scores: scores.sigmoid_().clamp(1e-4, 1 - 1e-4)), 8 * torch.randn(5, 4)
    over = Ending(lambda scores: scores.sigmoid().mul_(0.5))
    with torch.no_grad(), autocast_of(Settings(), "cpu", net):
        assert torch.equal(net(x).float(), net.layer(x).float().sigmoid().clamp(1e-4, 1 - 1e-4))
        found, scores = over(x).float(), over.layer(x)
    assert torch.equal(found, scores.sigmoid().mul(0.5).float())


@pytest.mark.parametrize(
    "end", [Turned.apply, lambda scores: checkpoint(torch.sigmoid, scores, use_reentrant=True)]
)
def test_a_function_with_a_backward_of_its_own_keeps_it(end: Callable[[Tensor], Tensor]) -> None:
    net, x = Ending(end), torch.randn(5, 4)
    grads = list[Tensor]()
    for context in (
        autocast_of(Settings(precision="bf16"), "cpu", net),
        torch.autocast("cpu", torch.bfloat16),
    ):
        net.zero_grad()
        with context:
            loss = functional.mse_loss(net(x).float(), torch.ones(5, 6))
        loss.backward()
        assert net.layer.weight.grad is not None
        grads.append(net.layer.weight.grad)
    assert torch.equal(*grads)


def test_a_part_in_inference_mode_is_left_as_it_is() -> None:
    class Frozen(Ending):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                weights = self.layer(x).softmax(-1)
            return self.layer(x) * weights.clone()

    net, x = Frozen(nn.Identity()), torch.randn(5, 4)
    with autocast_of(Settings(precision="bf16"), "cpu", net):
        found = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, net(x))


def test_a_loss_that_takes_the_half_itself_gets_fp32() -> None:
    net, x, y = Ending(nn.Sigmoid()), torch.randn(5, 4), torch.rand(5, 6)
    with autocast_of(Settings(precision="bf16"), "cpu", net):
        found = functional.mse_loss(net(x), y)
        expected = functional.mse_loss(net.layer(x).float().sigmoid(), y)
    assert torch.equal(found, expected)


def test_a_gate_in_the_middle_is_left_alone_and_then_no_forward_is_followed() -> None:
    class Gated(Ending):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return self.layer(x)[:, :4] @ (hidden * hidden.sigmoid())[:4, :4] * hidden.softmax(-1)[:, :4]

    net, x, known = Gated(nn.Identity()), torch.randn(5, 4), Saturation()
    followed = 1
    for _ in range(2):
        with autocast_of(Settings(precision="bf16"), "cpu", net, known):
            found = net(x).float()
            followed = len(torch.overrides._get_current_function_mode_stack())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(found, net(x).float())
    assert known.needed is False and followed == 0


def trained(seed: int, precision: str) -> tuple[int, float]:
    """Steps that were skipped, and the loss at the end, of a net with large scores before its sigmoid."""
    torch.manual_seed(seed)
    x = torch.randn(256, 10)
    y = ((x @ torch.randn(10) + 0.5 * torch.randn(256)) > 0).float()
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    with torch.no_grad():
        for one in net[2].parameters():
            one.mul_(100)

    def loss(rows: Tensor) -> Tensor:
        return binary_cross_entropy(net(x[rows]).squeeze(1).float(), y[rows])

    asked = Settings(n_epochs=20, batch_size=32, learning_rate=1e-2, precision=precision, seed=seed)
    records = list(amp.train(net, loss, 256, asked))
    with torch.no_grad():
        return sum(one.skipped for one in records), binary_cross_entropy(net(x).squeeze(1), y).item()


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_a_sigmoid_and_binary_cross_entropy_in_half_learn_as_in_fp32(seed: int) -> None:
    _, wide = trained(seed, "fp32")
    for precision in ("fp16", "bf16"):
        skipped, narrow = trained(seed, precision)
        assert skipped < 16 and narrow < wide + 0.5, (precision, wide, narrow)


def test_without_it_the_scale_collapses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saturation, "followed", lambda self: nullcontext())
    with pytest.raises(Stopped) as stopped:
        for seed in range(4):
            trained(seed, "fp16")
    assert stopped.value.code == "SCALE_COLLAPSE"
