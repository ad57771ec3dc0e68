"""Programs of unusual make: control flow, the user's own dtypes, shared weights, depth."""

import torch
import torch.nn.functional as F
from halfeven.models.spec.spec import Dim
from torch import Tensor, nn

from tests.nets import NETS

from .case import Case, ids, linear, net, normal


class Deep(nn.Module):
    """A residual stack: LayerNorm, two layers, a rectifier, a sum, forty times over."""

    def __init__(self, blocks: int, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), linear(width, width), nn.GELU(), linear(width, width, 0.2))
            for _ in range(blocks)
        )
        self.head = linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + 0.9 * block(x).clamp(-8.0, 8.0).transpose(0, 1).contiguous().transpose(0, 1)
        return self.head(x)


def switch(self, x: Tensor) -> Tensor:
    """The branch depends on the values of the one row."""
    hidden = self.embed(x)

    def loud(hidden: Tensor) -> Tensor:
        return self.one(hidden * hidden * 1e-6)

    def quiet(hidden: Tensor) -> Tensor:
        return self.two(torch.tanh(hidden))

    return self.head(torch.cond(x.abs().mean() > 0.8, loud, quiet, (hidden,)))


def by_length(self, x: Tensor) -> Tensor:
    """The branch depends on the length alone, so that rows do not depend on their batch."""

    def short(x: Tensor) -> Tensor:
        return self.one(x).mean(1)

    def long(x: Tensor) -> Tensor:
        return torch.tanh(self.two(x)).amax(1)

    return self.head(torch.cond(x.shape[1] > 8, long, short, (x,)))


def refine(self, x: Tensor) -> Tensor:
    def go_on(step: Tensor, state: Tensor) -> Tensor:
        return step < 4

    def better(step: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, torch.tanh(self.step(state) + state)

    from torch._higher_order_ops.while_loop import while_loop

    return self.head(while_loop(go_on, better, (torch.tensor(0), self.embed(x)))[1])


def running(self, x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.step(state) + row)
        return state, state * 2.0

    hidden = self.embed(x).transpose(0, 1)
    _, states = scan(step, torch.zeros_like(hidden[0]), hidden, dim=0)
    return self.head(states.transpose(0, 1))


def float_island(self, x: Tensor) -> Tensor:
    """RMSNorm as transformers write it: up to FP32 and back to what came."""
    hidden = self.embed(x)
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.head(self.weight * wide.to(hidden.dtype))


def switched_off(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    with torch.autocast("cpu", enabled=False):
        wide = hidden.float()
        mixed = wide @ wide.transpose(1, 2) / 3e4
    return self.head(torch.softmax(mixed, -1) @ hidden)


def switched_off_cuda(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    with torch.autocast("cuda", enabled=False):
        wide = self.inner(hidden.float() * 1e5)
    return self.head(torch.tanh(wide * 1e-5))


def own_half(self, x: Tensor) -> Tensor:
    return self.head(torch.tanh(self.embed(x).half()).float())


def double(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    return self.head(torch.linalg.solve(self.matrix, hidden.double().unsqueeze(-1)).squeeze(-1).float())


def spectrum(self, x: Tensor) -> Tensor:
    hidden = torch.fft.rfft(self.embed(x))
    return self.head(torch.fft.irfft(hidden * self.filter, n=32))


def repeated(self, x: Tensor) -> Tensor:
    hidden = self.embed(x)
    for _ in range(4):
        hidden = hidden + torch.tanh(self.block(hidden))
    return self.head(hidden)


def language(self, ids: Tensor) -> Tensor:
    hidden = self.embed(ids)
    hidden = hidden + self.up(F.relu(F.linear(hidden, self.up.weight.t())))
    return F.linear(self.norm(hidden), self.embed.weight)


def several(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.tanh(self.embed(x))
    return hidden, extra.expand(-1, 6).cumsum(-1).argmax(-1), extra > 0, x


def views(self, x: Tensor) -> Tensor:
    """Memory shared and written through."""
    hidden = self.embed(x).unflatten(-1, (4, 16))
    hidden[:, 0] += hidden[:, 1]
    hidden[:, 2].mul_(0.5).clamp_(min=-1.0)
    return self.head(hidden.flatten(1))


def with_inputs(name: str, free: dict[int, Dim] | None = None) -> Case:
    return Case(NETS[name].build, NETS[name].inputs, free=free or {})


def pair(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 32), "extra": torch.randn(rows, 1)}


CASES = {name: with_inputs(name) for name in ("adapter", "in place", "stacked", "tied", "island")} | {
    "deep stack": Case(lambda: Deep(40), normal(32)),
    "branch by value": Case(
        lambda: net(
            switch, embed=linear(32, 64, 2000.0), one=linear(64, 64), two=linear(64, 64), head=linear(64, 8)
        ),
        lambda rows: {
            "x": torch.randn(rows, 32) * torch.tensor([0.5, 1.5])[torch.arange(rows) // 2 % 2].unsqueeze(1)
        },
        "one branch of a torch.cond squares 2,000, the other does not; the choice binds the batch to 1",
        max_batch_size=1,
    ),
    "branch by length": Case(
        lambda: net(by_length, one=linear(16, 32), two=linear(16, 32), head=linear(32, 8)),
        normal(10, 16),
        free={1: Dim(2, 32)},
    ),
    "while loop": Case(
        lambda: net(refine, embed=linear(32, 64), step=linear(64, 64), head=linear(64, 8)), normal(32)
    ),
    "scan": Case(
        lambda: net(running, embed=linear(8, 32), step=linear(32, 32), head=linear(32, 4)), normal(6, 8)
    ),
    "float island": Case(
        lambda: net(float_island, embed=linear(32, 64, 400.0), head=linear(64, 8), weight=torch.ones(64)),
        normal(32),
        "an RMSNorm of 400 that its author already protects: FP32 there, and nothing to add",
        harmless=True,
    ),
    "autocast off": Case(
        lambda: net(switched_off, embed=linear(16, 64, 100.0), head=linear(64, 8)),
        normal(6, 16),
        "products of 1e6 in a region that the author took out of autocast",
        harmless=True,
    ),
    "autocast off for CUDA": Case(
        lambda: net(switched_off_cuda, embed=linear(32, 64), inner=linear(64, 64), head=linear(64, 8)),
        normal(32),
        "the same, switched off for a device that is not here",
        harmless=True,
    ),
    "own half": Case(lambda: net(own_half, embed=linear(32, 64), head=linear(64, 8)), normal(32)),
    "float64": Case(
        lambda: net(
            double, embed=linear(32, 16), head=linear(16, 4), matrix=torch.eye(16).double() * 2 + 0.1
        ),
        normal(32),
    ),
    "spectrum": Case(
        lambda: net(spectrum, embed=linear(32, 32), head=linear(32, 8), filter=torch.rand(17)), normal(32)
    ),
    "shared block": Case(
        lambda: net(repeated, embed=linear(32, 64), block=linear(64, 64), head=linear(64, 8)), normal(32)
    ),
    "tied language head": Case(
        lambda: net(language, embed=nn.Embedding(100, 32), up=linear(64, 32), norm=nn.LayerNorm(32)),
        ids(10),
        kinds=("logits",),
        free={1: Dim(2, 64)},
    ),
    "several outputs": Case(
        lambda: net(several, embed=linear(32, 16)), pair, kinds=("embedding", "indices", "tensor", "tensor")
    ),
    "views": Case(lambda: net(views, embed=linear(32, 64), head=linear(64, 8)), normal(32)),
}
