"""Traps of smallness: numbers under 6e-8 that matter, and guards against zero that half rounds to zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, linear, net, normal, scaled_rows


def tiny_product(self, x: Tensor) -> Tensor:
    return self.head(self.one(x) * self.two(x) * 1e8)


def tiny_weights(self, x: Tensor) -> Tensor:
    return self.head(torch.tanh(self.shrink(x) * 1e9))


class Shrinking(nn.Module):
    """Inverted residuals as in MobileNetV2, random: each block leaves a hundredth of what it is given."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.Sequential(*[self.block(8, 24) for _ in range(blocks)])
        self.head = nn.Conv2d(8, 5, 1, bias=False)

    @staticmethod
    def block(width: int, wide: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x))).mean((2, 3))


def shrinking() -> nn.Module:
    module = Shrinking()
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.normal_(part.weight, std=0.5 / (part.weight[0].numel() ** 0.5))
    return module


def expectation(self, x: Tensor) -> Tensor:
    """A mean over 20,000 words, each of which has a probability of about 5e-5."""
    return self.head(torch.softmax(self.scores(x), -1) @ self.values)


def tail(self, x: Tensor) -> Tensor:
    return -torch.log(1.0 - torch.sigmoid(self.grow(x)) + 1e-8)


def layer_scale(self, x: Tensor) -> Tensor:
    return self.head(self.stream(x) + self.gamma * torch.tanh(self.branch(x)))


def narrow_variance(self, x: Tensor) -> Tensor:
    return self.head(F.relu(self.norm(self.conv(x))).mean(2))


def tiny_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(16, eps=1e-12)
    norm.running_var = torch.full((16,), 1e-12)
    return norm


def tiny_conv() -> nn.Conv1d:
    conv = nn.Conv1d(4, 16, 3, padding=1, bias=False)
    nn.init.normal_(conv.weight, std=3e-7)
    return conv


# Guards.


def mean_guard(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    return self.head(hidden / (hidden.abs().mean(-1, keepdim=True) + 1e-8))


def variance_guard(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    centred = hidden - hidden.mean(-1, keepdim=True)
    return self.head(centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-12))


def clamp_guard(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    return self.head(hidden / hidden.abs().amax(-1, keepdim=True).clamp(min=1e-8))


def maximum_guard(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    return self.head(hidden / torch.maximum(hidden.abs().amax(-1, keepdim=True), self.least))


def log_guard(self, x: Tensor) -> Tensor:
    gates = torch.sigmoid(self.gate(x)) * (x > 0)
    return self.head(torch.log(gates.clamp(min=1e-10)))


def norm_guard(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    return self.head(hidden / (torch.sqrt((hidden * hidden).sum(-1, keepdim=True)) + 1e-12))


def reciprocal_guard(self, x: Tensor) -> Tensor:
    weights = F.relu(self.gate(x))
    return self.head(weights * torch.reciprocal(weights.mean(-1, keepdim=True) + 1e-9))


def harmless_guard(self, x: Tensor) -> Tensor:
    """The divisor is at least 1: the guard is never needed."""
    hidden = self.embed(x)
    return self.head(hidden / (1.0 + hidden.abs().amax(-1, keepdim=True) + 1e-8))


def guarded(forward, **more: Tensor) -> nn.Module:
    return net(forward, embed=linear(32, 64), head=linear(64, 8), **more)


CASES = {
    "tiny product": Case(
        lambda: net(tiny_product, one=linear(32, 64, 1e-4), two=linear(32, 64, 1e-4), head=linear(64, 8)),
        normal(32),
        "products of 1e-4 and 1e-4 are 0 in half, and are multiplied by 1e8 only afterwards",
    ),
    "tiny weights": Case(
        lambda: net(tiny_weights, shrink=linear(32, 64, 1e-9), head=linear(64, 8)),
        normal(32),
        "initialisers of 1e-10, all 0 in half",
    ),
    "shrinking net": Case(
        shrinking,
        normal(3, 12, 12),
        "a random MobileNetV2: what is left of the picture after four blocks is under 6e-8",
    ),
    "expectation": Case(
        lambda: net(expectation, scores=linear(32, 20000), values=torch.randn(20000, 8), head=linear(8, 4)),
        normal(32),
        "probabilities of 5e-5 are subnormal in half; their errors cancel, in all but one of thousands",
    ),
    "sigmoid tail": Case(
        lambda: net(tail, grow=linear(32, 8, 3.0)),
        normal(32),
        "1 − sigmoid + 1e-8: cancellation, then a guard that vanishes, then −log 0; past 15 the answer hangs on the "
        "last bit of x, so that the layer before must stay FP32 too, and nothing is left",
        hopeless=True,
    ),
    "layer scale": Case(
        lambda: net(
            layer_scale,
            stream=linear(32, 64),
            branch=linear(32, 64),
            head=linear(64, 8),
            gamma=torch.full((64,), 1e-8),
        ),
        normal(32),
        "a LayerScale of 1e-8 is 0 in half and changes nothing: nothing need be kept",
        harmless=True,
    ),
    "narrow variance": Case(
        lambda: net(narrow_variance, conv=tiny_conv(), norm=tiny_norm(), head=linear(16, 4)),
        normal(4, 20),
        "BatchNorm with a running variance of 1e-12 after a convolution of 1e-6",
    ),
    "eps 1e-8 on a mean": Case(
        lambda: guarded(mean_guard),
        scaled_rows(32, 0.0, 1e-3),
        "x / (mean|x| + 1e-8) with zero and small rows",
    ),
    "eps 1e-12 on a variance": Case(
        lambda: guarded(variance_guard),
        scaled_rows(32, 0.0, 1e-3),
        "(x − mean) / sqrt(var + 1e-12) with constant rows; squares of small rows underflow too",
    ),
    "clamp at 1e-8": Case(
        lambda: guarded(clamp_guard), scaled_rows(32, 0.0), "x / max|x|.clamp(min=1e-8) with zero rows"
    ),
    "maximum with 1e-10": Case(
        lambda: guarded(maximum_guard, least=torch.tensor(1e-10)),
        scaled_rows(32, 0.0),
        "a guard that is a tensor: maximum(max|x|, 1e-10) with zero rows",
    ),
    "clamp under a log": Case(
        lambda: net(log_guard, gate=linear(32, 32), head=linear(32, 8)),
        normal(32),
        "log(gates.clamp(min=1e-10)) where half of the gates are closed: log 0",
    ),
    "eps 1e-12 on a norm": Case(
        lambda: guarded(norm_guard),
        scaled_rows(32, 0.0, 1e-4),
        "x / (|x| + 1e-12) written out: squares of small rows underflow, zero rows divide 0 by 0",
    ),
    "eps under a reciprocal": Case(
        lambda: net(reciprocal_guard, gate=linear(32, 64), head=linear(64, 8)),
        scaled_rows(32, 0.0),
        "relu weights divided by their mean + 1e-9; a zero row has no weights",
    ),
    "harmless guard": Case(
        lambda: guarded(harmless_guard),
        scaled_rows(32, 0.0),
        "an eps of 1e-8 on what is at least 1: it vanishes and nobody misses it",
        harmless=True,
    ),
}
