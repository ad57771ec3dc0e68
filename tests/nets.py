"""Small nets that differ in what autocast has to do: each with a maker of fresh inputs, ``rows`` at a time."""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from halfeven.models.zoo.digits.model import build as digits
from torch import Tensor, nn

from tests.programs import Original, original


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]


class Residual(nn.Module):
    """Convolutions, BatchNorm, an in-place rectifier, a sum of half and FP32, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.norm.running_mean, self.norm.running_var = torch.randn(8), torch.rand(8) + 0.5

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.stem(image)
        hidden = hidden + F.relu(self.norm(self.conv(hidden)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


class Encoder(nn.Module):
    """Attention with a padding mask, layer norms, gelu, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.layer(self.embed(tokens), src_key_padding_mask=mask == 0).mean(1)


class Tied(nn.Module):
    """One weight read as an embedding, as a product and transposed; an in-place sum on a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(32, 16), nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 32)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.softmax(self.linear(self.embed(tokens)) @ self.linear.weight.t(), -1)
        hidden.add_(1.0)
        return self.head(hidden)


class Island(nn.Module):
    """The user's own ``.float()`` and ``.half()``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        power = hidden.float().pow(2).mean(-1, keepdim=True)
        return self.linear(hidden.half().float() * torch.rsqrt(power + 1e-3)), hidden.double().cumsum(-1)


class Adapter(nn.Module):
    """A product of two weights, which autocast does in half; the base weight is FP32 when it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.up, self.down = (nn.Parameter(torch.randn(*s)) for s in ((6, 8), (6, 2), (2, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base + self.up @ self.down)


class InPlace(nn.Module):
    """Memory that is made from a weight and written to through a view: it must be made anew at every run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.get_buffer("offset").clone()
        offset.view(-1).add_(1.0)
        hidden = self.linear(x).mul_(2.0)
        hidden[:, 0] = x[:, 1]
        return hidden + offset.flatten()


class Stacked(nn.Module):
    """Operators that the lists promote: cat and stack of half and FP32; a weight read in both precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        both = torch.cat([hidden, x, torch.stack([hidden, hidden], 2).flatten(1)], 1)
        return both.sum(1, keepdim=True) + hidden * self.linear.weight[0]


class Pictures(nn.Module):
    """A transposed convolution, group norm, a resize, an activation with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.act = nn.ConvTranspose2d(3, 4, 2), nn.GroupNorm(2, 4), nn.PReLU()

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.up(image)))
        return F.interpolate(hidden, scale_factor=2.0, mode="bilinear")


def normal(name: str, *shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: torch.randn(rows, *shape)}


def tokens(rows: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 32, (rows, 6))}


def masked(rows: int) -> dict[str, Tensor]:
    return tokens(rows) | {"mask": (torch.arange(6) < torch.randint(1, 7, (rows, 1))).long()}


NETS: dict[str, Net] = {
    "digits": Net(digits, lambda rows: {"image": torch.rand(rows, 1, 8, 8)}),
    "mlp": Net(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), normal("input", 8)),
    "residual": Net(Residual, normal("image", 3, 6, 6)),
    "encoder": Net(Encoder, masked),
    "tied": Net(Tied, tokens),
    "island": Net(Island, normal("x", 8)),
    "adapter": Net(Adapter, normal("x", 8)),
    "in place": Net(InPlace, normal("x", 4)),
    "stacked": Net(Stacked, normal("x", 4)),
    "pictures": Net(Pictures, normal("image", 3, 6, 6)),
}


@cache
def captured_net(name: str) -> Original:
    """A net of `NETS`, captured once in a process; its weights follow the session's seed."""
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(f"{name} {os.environ['HALFEVEN_TEST_SEED']}".encode()))
        return original(NETS[name].build(), NETS[name].inputs(8))
