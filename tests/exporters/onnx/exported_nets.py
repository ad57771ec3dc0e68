"""Nets as torch exports them to ONNX, with inputs for each."""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from halfeven.exporters.torch.onnx_form.decompositions import looked_up_once
from onnx import ModelProto
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + bias, -1)
        x = self.one(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        return self.two(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Two layers of attention with a padding mask, as text encoders are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.places = nn.Parameter(torch.randn(12, 32) * 0.1)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids) + self.places
        bias = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for block in self.blocks:
            x = block(x, bias)
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm(self.down(x)))
        return self.out(self.up(h) + F.interpolate(h[:, :4], scale_factor=2.0, mode="bilinear"))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return torch.cond(h.sum() > 0, lambda t: self.one(t) * 2, lambda t: self.two(t).relu(), (h,))


class RootMeanSquare(nn.Module):
    """A decoder's block: RMS norms and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(2000, 2000 + x.shape[1]).float()[:, None] * 10000 ** (-torch.arange(8) / 8)
        one, two = x.chunk(2, -1)
        x = torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)
        for _ in range(4):
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
            x = x + self.outer(F.silu(self.inner(h)))
        return x


Inputs = Callable[[np.random.Generator, int], dict[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Net:
    build: Callable[[], nn.Module]
    inputs: Inputs
    most_kept: int = 0
    max_batch_size: int = 8


def _normal(*shape: int) -> Inputs:
    return lambda random, rows: {"x": random.standard_normal((rows, *shape)).astype(np.float32)}


def _text(random: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    lengths = random.integers(1, 13, rows)
    return {
        "ids": random.integers(0, 100, (rows, 12)),
        "mask": (np.arange(12) < lengths[:, None]).astype(np.int64),
    }


NETS = {
    "encoder": Net(Encoder, _text, most_kept=2),
    "convolutions": Net(Convolutions, _normal(3, 8, 8)),
    "recurrent": Net(Recurrent, _normal(5, 6)),
    "branching": Net(Branching, _normal(8), max_batch_size=1),
    "decoder": Net(RootMeanSquare, _normal(10, 16)),
}


@cache
def exported(name: str) -> ModelProto:
    net = NETS[name]
    torch.manual_seed(5)
    example = {k: torch.from_numpy(v) for k, v in net.inputs(np.random.default_rng(1), 3).items()}
    return exported_module(net.build().eval(), example)


def exported_module(module: nn.Module, inputs: Mapping[str, Tensor]) -> ModelProto:
    """The module as torch.onnx writes it, with a free batch axis and one output ``y``."""
    batch = torch.export.Dim("batch", min=1, max=64)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), looked_up_once():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            opset_version=18,
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            input_names=list(inputs),
            output_names=["y"],
            verbose=False,
        )
    assert program is not None
    return program.model_proto
