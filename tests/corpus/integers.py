"""Numbers that are names: ids, counts, places. No rounding may touch them, and no rule may fear their size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, ids, linear, net, normal


def large_ids(self, ids: Tensor) -> Tensor:
    return self.head(torch.tanh(self.inner(self.embed(ids)).mean(1)))


def hashed(self, ids: Tensor) -> Tensor:
    """Several small tables instead of a large one: (id · prime) mod 97."""
    places = (ids.unsqueeze(-1) * self.primes) % 97
    return self.head(torch.tanh(self.inner(self.embed(places).flatten(2).mean(1))))


def counted(self, ids: Tensor) -> Tensor:
    """Running totals over 65,504, and their parity."""
    totals = (ids * 1000).cumsum(-1)
    return self.head(self.embed(ids) * (totals % 2 * 2 - 1).unsqueeze(-1)).sum(1)


def one_hot(self, ids: Tensor) -> Tensor:
    return self.head(F.one_hot(ids % 16, 16).float().mean(1))


def age(self, ids: Tensor) -> Tensor:
    """An id as a number: 50,000 itself goes into a layer."""
    return self.head(torch.tanh(self.scale(ids.float() - 25000.0)))


def choice(self, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = self.embed(x)
    return logits, logits.argmax(-1)


def ranked(self, x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = self.embed(x).topk(5, -1)
    return values, places


def gathered(self, x: Tensor, ids: Tensor) -> Tensor:
    places = (ids % 6).unsqueeze(-1).expand(-1, -1, 32)
    return self.head(torch.tanh(self.embed(x)).gather(1, places).flip(1))


def scattered(self, x: Tensor, ids: Tensor) -> Tensor:
    totals = torch.zeros(x.shape[0], 10, 32).scatter_add(
        1, ids.unsqueeze(-1).expand(-1, -1, 32), self.embed(x)
    )
    return self.head(torch.relu(totals))


def placed(self, x: Tensor, ids: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0]).unsqueeze(1)
    board = torch.zeros(x.shape[0], 10, 32).index_put((rows, ids), self.embed(x).float(), accumulate=True)
    return self.head(board)


def bag(self, ids: Tensor) -> Tensor:
    return self.head(torch.tanh(F.embedding_bag(ids, self.table, mode="mean")))


def sorted_scores(self, x: Tensor) -> Tensor:
    return self.head(self.embed(x).sort(-1).values)


def classes(rows: int) -> dict[str, Tensor]:
    """Each row clearly of one of four classes: no choice is close."""
    return {"x": torch.randn(rows, 32) + 8.0 * F.one_hot(torch.randint(0, 4, (rows,)), 32)}


def clear() -> nn.Linear:
    layer = linear(32, 4)
    with torch.no_grad():
        layer.weight.add_(torch.eye(4, 32))
    return layer


def edges(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, 16), "ids": torch.randint(0, 10, (rows, 6))}


CASES = {
    "large ids": Case(
        lambda: net(large_ids, embed=nn.Embedding(50000, 8), inner=linear(8, 32), head=linear(32, 4)),
        ids(6, below=50000),
    ),
    "hashed ids": Case(
        lambda: net(
            hashed,
            embed=nn.Embedding(97, 8),
            inner=linear(16, 32),
            head=linear(32, 4),
            primes=torch.tensor([2654435761, 40503]),
        ),
        ids(6, below=50000),
        "ids times a prime, modulo 97: 1e14, exact as an integer only",
        harmless=True,
    ),
    "running totals": Case(
        lambda: net(counted, embed=nn.Embedding(100, 32), head=linear(32, 4)),
        ids(12),
        "integer totals of a million whose last bit counts",
        harmless=True,
    ),
    "one hot": Case(lambda: net(one_hot, head=linear(16, 4)), ids(6)),
    "id as a number": Case(
        lambda: net(age, scale=linear(6, 32, 1e-5), head=linear(32, 4)), ids(6, below=50000)
    ),
    "argmax": Case(lambda: net(choice, embed=clear()), classes, kinds=("logits", "indices")),
    "topk": Case(
        lambda: net(ranked, embed=linear(32, 300)),
        normal(32),
        "the five best of 300 scores: ties within the rounding may change places",
        ("tensor", "indices"),
        harmless=True,
    ),
    "sorted": Case(lambda: net(sorted_scores, embed=linear(32, 64), head=linear(64, 4)), normal(32)),
    "gather": Case(lambda: net(gathered, embed=linear(16, 32), head=linear(32, 4)), edges),
    "scatter add": Case(lambda: net(scattered, embed=linear(16, 32), head=linear(32, 4)), edges),
    "index put": Case(lambda: net(placed, embed=linear(16, 32), head=linear(32, 4)), edges),
    "embedding bag": Case(lambda: net(bag, table=torch.randn(100, 32), head=linear(32, 4)), ids(6)),
}
