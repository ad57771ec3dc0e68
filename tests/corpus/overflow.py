"""Traps of size: something on the way is larger than 65,504 though neither input nor answer is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, linear, net, normal, scaled_rows


def rms_norm(self, x: Tensor) -> Tensor:
    hidden = self.grow(x)
    hidden = hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + 1e-6)
    return self.head(hidden)


def layer_norm(self, x: Tensor) -> Tensor:
    hidden = self.grow(x)
    centred = hidden - hidden.mean(-1, keepdim=True)
    deviation = torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return self.head(centred / deviation)


def standardise(self, x: Tensor) -> Tensor:
    hidden = self.grow(x)
    return self.head(
        (hidden - hidden.mean(-1, keepdim=True)) / torch.sqrt(hidden.var(-1, keepdim=True) + 1e-5)
    )


def long_sum(self, x: Tensor) -> Tensor:
    hidden = F.relu(self.grow(x))
    pairs = (hidden.unsqueeze(2) * self.weights).flatten(1)  # [rows, 102400]
    return self.head(hidden * (pairs @ self.ones) * 1e-5)


def long_mean(self, x: Tensor) -> Tensor:
    hidden = F.relu(self.grow(x))
    pairs = (hidden.unsqueeze(2) * self.other(x).abs().unsqueeze(1)).flatten(1)
    return self.head(hidden / pairs.mean(1, keepdim=True))


def gated(self, x: Tensor) -> Tensor:
    return self.head(torch.tanh(self.value(x) * self.gate(x) * 1e-5))


def harmless(self, x: Tensor) -> Tensor:
    hidden = self.grow(x)
    return self.head(hidden / 400 * (hidden * hidden).clamp(max=1000.0) * 1e-3)


def large_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = self.grow(torch.tanh(self.first(x)))
    return torch.softmax(logits, -1), torch.logsumexp(logits, -1, keepdim=True) * 1e-5


def huge_weights(self, x: Tensor) -> Tensor:
    return self.head(torch.tanh(self.shrink(x) * self.scale * self.million))


def distances(self, x: Tensor) -> Tensor:
    hidden = self.grow(x)
    squares = (hidden * hidden).sum(-1, keepdim=True) + (self.centres * self.centres).sum(-1)
    return torch.sqrt(F.relu(squares - 2 * (hidden @ self.centres.t())) + 1e-6) * 1e-2


def scores(self, x: Tensor) -> Tensor:
    query, key = self.query(x), self.key(x)
    weights = torch.softmax(query @ key.transpose(1, 2) / 3e4, -1)
    return self.head(weights @ self.value(x))


def massive(self, x: Tensor) -> Tensor:
    """One channel of the residual stream grows to 1e5, as in large language models; the norms take it away."""
    stream = self.embed(x)
    for block, normed in ((self.one, self.norm_one), (self.two, self.norm_two)):
        stream = stream + block(normed(stream))
    return self.head(self.last(stream))


def massive_parts() -> dict[str, nn.Module]:
    def loud(inputs: int) -> nn.Linear:
        layer = linear(inputs, 64, bias=True)
        with torch.no_grad():
            layer.bias.zero_()[5] = 3e4
        return layer

    blocks = {name: nn.Sequential(linear(64, 64), nn.GELU(), loud(64)) for name in ("one", "two")}
    norms = {name: nn.LayerNorm(64) for name in ("norm_one", "norm_two", "last")}
    return {"embed": loud(32), "head": linear(64, 8, 30.0), **blocks, **norms}


def energy(self, x: Tensor) -> Tensor:
    """A spectrogram's log energy: loud squares overflow, quiet ones underflow."""
    frames = self.frames(x)
    return self.head(torch.log(frames[:, :8] * frames[:, :8] + frames[:, 8:] * frames[:, 8:] + 1e-6))


def loud_frames() -> nn.Conv1d:
    conv = nn.Conv1d(1, 16, 32, stride=16, bias=False)
    nn.init.normal_(conv.weight, std=60.0)
    return conv


def group_norm(self, x: Tensor) -> Tensor:
    hidden = self.conv(x)
    return self.head(F.silu(self.norm(hidden)).mean((2, 3)))


def loud_conv() -> nn.Conv2d:
    conv = nn.Conv2d(3, 8, 3, padding=1)
    nn.init.normal_(conv.weight, std=1e4)
    return conv


CASES = {
    "rms norm of large": Case(
        lambda: net(rms_norm, grow=linear(32, 64, 400.0), head=linear(64, 8)),
        normal(32),
        "a decomposed RMSNorm squares 400: the mean square is infinite, its reciprocal 0, the answer 0",
    ),
    "layer norm of large": Case(
        lambda: net(layer_norm, grow=linear(32, 64, 500.0), head=linear(64, 8)),
        normal(32),
        "a decomposed LayerNorm squares 500",
    ),
    "variance of large": Case(
        lambda: net(standardise, grow=linear(32, 64, 1000.0), head=linear(64, 8)),
        normal(32),
        "var of numbers around 1,000 is a million: no square is in the graph, its result overflows",
    ),
    "long sum": Case(
        lambda: net(
            long_sum,
            grow=linear(32, 320, 2.0),
            head=linear(320, 8),
            weights=torch.rand(320),
            ones=torch.ones(102400, 1),
        ),
        normal(32),
        "a product with ones sums 102,400 elements to about 4e4 to 2e5",
    ),
    "long mean": Case(
        lambda: net(long_mean, grow=linear(32, 320, 4.0), other=linear(32, 320), head=linear(320, 8)),
        normal(32),
        "a mean of 102,400 elements whose sum no half holds, but the kernels add in FP32: nothing need be kept",
        harmless=True,
    ),
    "gate": Case(
        lambda: net(gated, value=linear(32, 64, 400.0), gate=linear(32, 64, 400.0), head=linear(64, 8)),
        normal(32),
        "a product of two numbers around 400, scaled down only afterwards",
    ),
    "harmless overflow": Case(
        lambda: net(harmless, grow=linear(32, 64, 400.0), head=linear(64, 8)),
        normal(32),
        "a square overflows and is clamped to 1,000 at once: infinity is as good, nothing need be kept",
        harmless=True,
    ),
    "large logits": Case(
        lambda: net(large_logits, first=linear(32, 32), grow=linear(32, 10, 1e5)),
        normal(32),
        "softmax and logsumexp over logits of ±1e5, which overflow as the result of a product",
        ("probabilities", "tensor"),
    ),
    "huge weights": Case(
        lambda: net(
            huge_weights,
            shrink=linear(32, 64, 1e-10),
            head=linear(64, 8),
            scale=torch.full((64,), 7e4),
            million=torch.tensor(1e6),
        ),
        normal(32),
        "initialisers of 7e4 and 1e6 that half does not have, after weights of 1e-11 that it has not either",
    ),
    "distances": Case(
        lambda: net(distances, grow=linear(32, 64, 100.0), centres=100 * torch.randn(16, 64)),
        normal(32),
        "|a|² + |b|² − 2ab: squares sum to 6e5",
    ),
    "unscaled scores": Case(
        lambda: net(
            scores,
            query=linear(64, 64, 100.0),
            key=linear(64, 64, 100.0),
            value=linear(64, 64),
            head=linear(64, 8),
        ),
        normal(12, 64),
        "attention divides after the product: query · key is around 1e5",
    ),
    "massive channel": Case(
        lambda: net(massive, **massive_parts()),
        normal(32),
        "three times 3e4 in one channel of a residual stream: its last sum overflows, no block does",
    ),
    "log energy": Case(
        lambda: net(energy, frames=loud_frames(), head=nn.Conv1d(8, 4, 1)),
        lambda rows: {"x": torch.randn(rows, 1, 512) * 10.0 ** torch.linspace(-5, 0.3, 512)},
        "squares of both 500 and 1e-4: overflow and underflow in one tensor, under a logarithm",
    ),
    "loud convolution": Case(
        lambda: net(group_norm, conv=loud_conv(), norm=nn.GroupNorm(2, 8), head=linear(8, 4)),
        normal(3, 8, 8),
        "GroupNorm after a convolution that reaches 1e5",
    ),
    "wide range rows": Case(
        lambda: net(
            lambda self, x: self.head(F.normalize(self.grow(x), dim=-1)),
            grow=linear(32, 64, 1.0),
            head=linear(64, 8),
        ),
        scaled_rows(32, 1e-6, 1e5),
        "rows of 1e-6 and of 1e5 beside ordinary ones, each normalised: overflow and underflow by the row",
    ),
}
