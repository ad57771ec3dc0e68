"""The network of the mixed-precision tutorials: 784 pixels, 256 hidden, 10 classes."""

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.classify = nn.Linear(784, 256), nn.Linear(256, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.classify(torch.relu(self.hidden(pixels)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return MLP()
