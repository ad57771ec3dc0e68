"""Nets that add into a tensor in the ways in which CUDA adds without an order."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Added(nn.Module):
    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, (x[:, 0] * 0).long().clamp(0, 3)) * 3.0


ADDS = {
    "scatter_add": lambda x, at: torch.zeros_like(x).scatter_add(1, at[:, None].expand_as(x), x),
    "index_add": lambda x, at: torch.zeros_like(x).index_add(0, at.clamp(0, 0), x),
    "index_put": lambda x, at: torch.zeros_like(x).index_put((at,), x, accumulate=True),
    "scatter_reduce": lambda x, at: torch.zeros_like(x).scatter_reduce(1, at[:, None].expand_as(x), x, "sum"),
    "scatter": lambda x, at: torch.zeros_like(x).scatter(1, at[:, None].expand_as(x), x, reduce="add"),
}
