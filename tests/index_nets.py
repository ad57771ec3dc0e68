"""Small nets that index tables with what they are sent: one for each way from an input to a table."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs import Original, original


class Table(nn.Module):
    """``of`` makes indices of ids; the answer is what the table holds there, summed."""

    def __init__(self, of: Callable[[Tensor], Tensor], rows: int = 50, padding: int | None = None) -> None:
        super().__init__()
        self.of = of
        self.table = nn.Embedding(rows, 4, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(self.of(ids)).flatten(1).sum(1, keepdim=True)


class Two(nn.Module):
    def __init__(self, of: Callable[["Two", Tensor], Tensor], rows: int = 30, others: int = 50) -> None:
        super().__init__()
        self.of = of
        self.one, self.other = nn.Embedding(rows, 4), nn.Embedding(others, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.of(self, ids).flatten(1).sum(1, keepdim=True)


class Op(nn.Module):
    """``table`` [50, 4] in any op; ``of`` gives a tensor with the batch first."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of
        self.table = nn.Parameter(torch.randn(50, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.of(self.table, ids).flatten(1).sum(1, keepdim=True)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class Roberta(nn.Module):
    """Positions are counted among the ids that are no padding, from padding + 1 on."""

    def __init__(self, padding: int = 1, positions: int = 14) -> None:
        super().__init__()
        self.padding = padding
        self.words = nn.Embedding(50, 4, padding_idx=padding)
        self.positions = nn.Embedding(positions, 4, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids.ne(self.padding).int()
        places = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + self.padding
        return (self.words(ids) + self.positions(places)).flatten(1).sum(1, keepdim=True)


class Binned(nn.Module):
    """Ids are computed from real numbers: which, only the program knows."""

    def __init__(self, bins: int = 10) -> None:
        super().__init__()
        self.table = nn.Embedding(bins, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x * 10).long()).sum(1))


class Picked(nn.Module):
    """The indexed tensor has a free size."""

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        return x.gather(1, which)


def scattered(table: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(ids.shape[0], 50).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))


def put(table: Tensor, ids: Tensor) -> Tensor:
    return (table.clone().index_put((ids[:, 0],), torch.zeros(4)).sum() + ids[:, :1]).float()


# name → a module of ids [rows, 5], and the values that an id may have as the module's kernels have it.
RANGED: dict[str, Callable[[], nn.Module]] = {
    "an embedding": lambda: Table(lambda ids: ids),
    "padding": lambda: Table(lambda ids: ids, padding=0),
    "an offset": lambda: Table(lambda ids: ids + 3),
    "views and casts": lambda: Table(lambda ids: ids.view(-1, 5, 1).to(torch.int32).transpose(1, 2).long()),
    "two tables": lambda: Two(lambda net, ids: net.one(ids) + net.other(ids)),
    "two tables with an offset": lambda: Two(lambda net, ids: net.one(ids + 2) + net.other(ids + 7)),
    "index": lambda: Op(lambda table, ids: table[ids]),
    "index_select": lambda: Op(lambda table, ids: table.index_select(0, ids.reshape(-1)).view(-1, 20)),
    "gather": lambda: Op(lambda table, ids: table.t()[None].expand(ids.shape[0], 4, 50).gather(2, ids[:, None].expand(-1, 4, -1))),  # noqa: E501
    "take": lambda: Op(lambda table, ids: table.take(ids)),
    "take_along_dim": lambda: Op(lambda table, ids: torch.take_along_dim(table, ids).view(-1, 5)),
    "scatter": lambda: Op(scattered),
    "one_hot": lambda: Op(lambda table, ids: F.one_hot(ids, 50).float() @ table),
    "a bag": Bag,
}  # fmt: skip
# name → a module of ids [rows, 5] whose columns belong to tables of their own.
COLUMNS: dict[str, Callable[[], nn.Module]] = {
    "selected": lambda: Two(lambda net, ids: net.one(ids[:, 0]) + net.other(ids[:, 1] - 1)),
    "unbound": lambda: Two(lambda net, ids: net.one(ids.unbind(1)[4]) + net.other(ids.unbind(1)[2])),
    "cut": lambda: Two(lambda net, ids: net.one(ids[:, :2]).sum(1) + net.other(ids[:, 2:]).sum(1)),
    "split": lambda: Two(lambda net, ids: net.one(ids.split([1, 4], 1)[0]).sum(1) + net.other(ids.chunk(2, 1)[1]).sum(1)),  # noqa: E501
    "all and one": lambda: Two(lambda net, ids: net.other(ids).sum(1) + net.one(ids[:, 3])),
    "written into": lambda: Op(put),
}  # fmt: skip
# Indices that the program computes, which are in range whatever is sent.
PROVEN: dict[str, Callable[[], nn.Module]] = {
    "a truth": lambda: Table(lambda ids: (ids > 3).long() + 48),
    "positions": lambda: Op(lambda table, ids: table[torch.arange(ids.shape[1])][None] * ids[..., None]),
    "a row for each": lambda: Op(lambda table, ids: ids[torch.arange(ids.shape[0])]),
}  # fmt: skip
# Indices that are not followed back to the ids: most of them may be out of range.
GUARDED: dict[str, Callable[[], nn.Module]] = {
    "a difference": lambda: Table(lambda ids: 40 - ids),
    "a factor": lambda: Table(lambda ids: ids * 3 - 2),
    "a negative factor": lambda: Table(lambda ids: -2 * ids + 9),
    "floor division": lambda: Table(lambda ids: ids // 4),
    "truncated division": lambda: Table(lambda ids: torch.div(ids, 4, rounding_mode="trunc")),
    "a lower clamp": lambda: Table(lambda ids: ids.clamp(min=0)),
    "a clamp above the table": lambda: Table(lambda ids: ids.clamp(-3, 60) + 3),
    "a minimum": lambda: Table(lambda ids: torch.minimum(ids, torch.tensor(20)) + 29),
    "a cast to float and back": lambda: Table(lambda ids: (ids.float() + 1.0).long()),
    "a part that is replaced": lambda: Table(lambda ids: torch.where(ids < 0, 0, ids)),
    "one value that is replaced": lambda: Table(lambda ids: ids.masked_fill(ids == -1, 7)),
    "all but some": lambda: Table(lambda ids: torch.where(ids >= 2, ids, torch.full_like(ids, 2))),
    "a concatenation": lambda: Table(lambda ids: torch.cat([torch.zeros_like(ids), ids + 1], 1)),
    "a repetition": lambda: Table(lambda ids: ids.repeat(1, 2).flip(1)),
    "padded": lambda: Table(lambda ids: F.pad(ids, (1, 2), value=3)),
    "sorted": lambda: Table(lambda ids: ids.sort(dim=1).values),
    "argmax": lambda: Table(lambda ids: ids.argmax(1, keepdim=True), rows=5),
    "topk": lambda: Table(lambda ids: ids.topk(2, dim=1).indices, rows=5),
    "the last place of a mask": lambda: Op(
        lambda table, ids: ids[torch.arange(ids.shape[0]), (ids != 0).sum(1) - 1][:, None]
    ),
    "a remainder": lambda: Table(lambda ids: ids % 50),
    "a clamp": lambda: Table(lambda ids: ids.clamp(0, 49)),
    "places among those sent": lambda: Op(lambda table, ids: ids.gather(1, ids.argsort(1))),
    "a product": lambda: Table(lambda ids: ids * ids.flip(1)),
    "a sum": lambda: Table(lambda ids: ids.sum(1, keepdim=True)),
    "a mask of another": lambda: Table(lambda ids: torch.where(ids[:, :1] > 0, ids, 0)),
    "a hole": lambda: Table(lambda ids: ids.masked_fill(ids == -100, 0)),
    "written over": lambda: Table(lambda ids: ids.clone().mul_(2).add_(1)),
}


@cache
def captured(name: str) -> Original:
    """One of the nets above, with ids [rows, 5]."""
    build = {**RANGED, **COLUMNS, **PROVEN, **GUARDED}[name]
    return original(build(), {"ids": torch.ones(4, 5, dtype=torch.int64)})
