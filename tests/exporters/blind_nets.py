"""Twenty nets whose answers to usual samples show no error of a half: saturated, constant, dead."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Blind(nn.Module):
    """A trunk and a head of which the samples show nothing. ``end``: the saturated or constant part."""

    def __init__(self, end: Callable[[Tensor], Tensor], pictures: bool = False) -> None:
        super().__init__()
        self.pictures, self.end = pictures, end
        self.first = nn.Conv2d(3, 16, 3, padding=1) if pictures else nn.Linear(32, 48)
        self.second = nn.Linear(16 if pictures else 48, 48)
        self.last = nn.Linear(48, 60)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.relu(self.first(x))
        seen = seen.mean((2, 3)) if self.pictures else seen
        return self.end(self.last(torch.relu(self.second(seen))))


def captcha(logits: Tensor) -> Tensor:
    """Six places, of which each has one letter that always wins."""
    favoured = torch.zeros(10).index_fill(0, torch.tensor([3]), 40.0)
    return torch.softmax(logits.reshape(-1, 6, 10) + favoured, -1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(32, 32, batch_first=True)
        self.last = nn.Linear(32, 60)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.cells(x[:, None].expand(-1, 8, -1))
        return captcha(self.last(steps[:, -1]))


class Prototypes(nn.Module):
    """Answers of each sample's own, all of them certain: the samples are the classes' prototypes with some noise."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end, self.mix = end, nn.Linear(32, 32, bias=False)
        nn.init.orthogonal_(self.mix.weight)
        self.last = nn.Linear(32, 8, bias=False)
        self.last.weight.data = 40 / 32 * (self.mix(prototypes()).detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(self.mix(x)))


def prototypes() -> Tensor:
    """Eight rows of a Hadamard matrix: each is at right angles to the others."""
    rows = torch.ones(1, 1)
    for _ in range(5):
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows[8:16]


def near_prototypes(rows: int) -> Tensor:
    return prototypes()[torch.arange(rows) % 8] + 0.05 * torch.randn(rows, 32)


class LongHead(nn.Module):
    """A net in which many more layers read a part that the samples do not move."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.rest = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(32, 32), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(self.first(x) * 0.1 + 30))


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "captcha": captcha,
    "captcha after a norm": lambda y: captcha(nn.functional.layer_norm(y, (60,))),
    "sigmoid": lambda y: torch.sigmoid(y + 30),
    "tanh": lambda y: torch.tanh(y - 20),
    "erf": lambda y: torch.erf(y + 12),
    "hard sigmoid": lambda y: nn.functional.hardsigmoid(y + 50),
    "hard tanh": lambda y: nn.functional.hardtanh(y + 50),
    "relu6": lambda y: nn.functional.relu6(y + 50),
    "clip": lambda y: y.clamp(90.0, 100.0) + 1,
    "dead relu": lambda y: torch.relu(y - 50) + 1,
    "zero": lambda y: y * 0 + torch.linspace(1, 2, 60),
    "choice": lambda y: torch.where(y > 100, y, torch.linspace(1, 2, 60).expand_as(y)),
    "argmax": lambda y: (y + torch.zeros(60).index_fill(0, torch.tensor([7]), 40.0)).argmax(-1),
    "threshold": lambda y: y > 100.0,
}


def usual(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def blind_nets() -> dict[str, tuple[nn.Module, Callable[[int], Tensor]]]:
    """Twenty nets, each with the function that makes its samples."""
    found: dict[str, tuple[nn.Module, Callable[[int], Tensor]]] = {
        name: (Blind(end), usual(32)) for name, end in ENDS.items()
    }
    return found | {
        "pictures": (Blind(captcha, pictures=True), usual(3, 20, 40)),
        "recurrent": (Recurrent(), usual(32)),
        "long head": (LongHead(), usual(32)),
        "classes": (Prototypes(lambda y: torch.softmax(y, -1)), near_prototypes),
        "labels": (Prototypes(lambda y: torch.sigmoid(y - 20)), near_prototypes),
        "equal samples": (Blind(lambda y: y), lambda rows: torch.ones(rows, 32)),
    }
