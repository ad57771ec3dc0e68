"""A convolutional network for 28×28 grey pictures: two convolutions, a pooling, two layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.5)
        self.hidden, self.classify = nn.Linear(32 * 12 * 12, 64), nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(image)))), 2)
        return self.classify(self.dropout(F.relu(self.hidden(hidden.flatten(1)))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return CNN()
