"""A small convolutional network for 8×8 handwritten digits: ``[N,1,8,8]`` in 0..1 to logits ``[N,10]``."""

import torch
from torch import nn


def stage(inputs: int, outputs: int) -> nn.Sequential:
    """3×3 convolution, normalisation, rectifier; the normalisation has the bias."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            stage(1, 32),
            stage(32, 64),
            nn.MaxPool2d(2),
            stage(64, 64),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(0.3)
        self.classify = nn.Linear(64 * 2 * 2, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classify(self.dropout(self.features(image).flatten(1)))


def build() -> nn.Module:
    return DigitNet()
