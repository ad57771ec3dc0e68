"""A small residual network: ``[N,3,32,32]`` to logits ``[N,10]``. He et al., Deep Residual Learning (2016)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.stages = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.classify = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(F.adaptive_avg_pool2d(self.stages(self.stem(image)), 1).flatten(1))


def settle(module: nn.Module, *inputs: Tensor) -> None:
    """Give every BatchNorm the statistics of these inputs, as training would."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the plain mean
    with torch.no_grad():
        module.train()(*inputs)


def build() -> nn.Module:
    torch.manual_seed(0)
    module = ResNet()
    settle(module, torch.randn(32, 3, 32, 32))
    return module
