"""Healthy nets of layers that zoos are made of; what a conversion must not break for nothing."""

import torch
import torch.nn.functional as F
from halfeven.models.spec.spec import Dim
from torch import Tensor, nn

from tests.nets import NETS

from .case import Case, linear, net, normal


class Recurrent(nn.Module):
    def __init__(self, loop: nn.Module, width: int) -> None:
        super().__init__()
        self.loop, self.head = loop, linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.loop(x)[0][:, -1])


def speech() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 32, 5, padding=2), nn.GLU(1), nn.InstanceNorm1d(16, affine=True), nn.SiLU(),
        nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=4), nn.Mish(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        linear(64, 4),
    )  # fmt: skip


def video() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 8, 1),
        nn.Softplus(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), linear(8, 4),
    )  # fmt: skip


def upscaler() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.LeakyReLU(0.1), nn.ReflectionPad2d(1),
        nn.ConvTranspose2d(3, 8, 4, stride=2, padding=1), nn.Hardswish(), nn.PixelUnshuffle(2),
        nn.Conv2d(32, 3, 1), nn.Tanh(),
    )  # fmt: skip


def mixer(self, x: Tensor) -> Tensor:
    hidden = torch.einsum("nlc,dc->nld", x, self.inner.weight)
    gates = torch.einsum("nld,nmd->nlm", hidden, hidden) / 32**0.5
    return self.head(torch.einsum("nlm,nmd->nld", gates.sigmoid(), hidden))


def warped(self, x: Tensor) -> Tensor:
    places = self.place(F.adaptive_avg_pool2d(x, 1).flatten(1)).view(-1, 2, 3)
    field = F.affine_grid(torch.tanh(places), [x.shape[0], 3, 8, 8], align_corners=False)
    return self.head(F.grid_sample(x, field, align_corners=False))


def activations(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    parts = (
        F.gelu,
        F.silu,
        F.softplus,
        F.elu,
        F.selu,
        F.hardsigmoid,
        F.logsigmoid,
        F.celu,
        torch.erf,
        torch.expm1,
    )
    return self.head(sum(part(hidden.clamp(-4.0, 4.0)) for part in parts))


def pooled(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    return self.head(torch.cat([hidden.mean(1), hidden.amax(1), hidden.std(1), hidden.logsumexp(1)], -1))


def mixture(self, x: Tensor) -> Tensor:
    """Two of four experts by a soft gate; all run, as in small mixtures."""
    gate = torch.softmax(self.gate(x), -1)
    experts = torch.stack([expert(x) for expert in (self.one, self.two, self.three)], 1)
    return self.head((gate.unsqueeze(-1) * torch.relu(experts)).sum(1))


CASES = {name: Case(NETS[name].build, NETS[name].inputs) for name in ("residual", "encoder", "pictures")} | {
    "lstm": Case(lambda: Recurrent(nn.LSTM(8, 16, 2, batch_first=True), 16), normal(6, 8)),
    "gru": Case(lambda: Recurrent(nn.GRU(8, 16, batch_first=True, bidirectional=True), 32), normal(6, 8)),
    "speech": Case(speech, normal(4, 24, name="input")),
    "video": Case(video, normal(2, 4, 8, 8, name="input")),
    "upscaler": Case(upscaler, normal(3, 8, 8, name="input"), kinds=("image",)),
    "einsum": Case(
        lambda: net(mixer, inner=linear(16, 32), head=linear(32, 8)), normal(6, 16), free={1: Dim(2, 32)}
    ),
    "warp": Case(lambda: net(warped, place=linear(3, 6), head=nn.Conv2d(3, 4, 3)), normal(3, 8, 8)),
    "activations": Case(lambda: net(activations, embed=linear(32, 64), head=linear(64, 8)), normal(32)),
    "pooling": Case(
        lambda: net(pooled, embed=linear(16, 32), head=linear(128, 8)), normal(10, 16), free={1: Dim(2, 32)}
    ),
    "experts": Case(
        lambda: net(
            mixture,
            gate=linear(32, 3),
            one=linear(32, 64),
            two=linear(32, 64),
            three=linear(32, 64),
            head=linear(64, 8),
        ),
        normal(32),
    ),
}
