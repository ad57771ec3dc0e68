"""A generator of the pix2pix type: a picture ``[N,3,32,32]`` in −1..1 to another one. Isola et al. (2017)."""

import torch
from torch import Tensor, nn


def down(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.2),
    )


def up(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False),
        nn.InstanceNorm2d(outputs, affine=True),
        nn.ReLU(),
    )


class Generator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = (
            down(3, width),
            down(width, 2 * width),
            down(2 * width, 4 * width),
        )
        self.up3, self.up2 = up(4 * width, 2 * width), up(4 * width, width)
        self.paint = nn.ConvTranspose2d(2 * width, 3, 4, stride=2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        large = self.down1(image)
        middle = self.down2(large)
        hidden = self.up3(self.down3(middle))
        hidden = self.up2(torch.cat([hidden, middle], 1))
        return torch.tanh(self.paint(torch.cat([hidden, large], 1)))


def settle(module: nn.Module, *inputs: Tensor) -> None:
    """Give every BatchNorm the statistics of these inputs, as training would."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the plain mean
    with torch.no_grad():
        module.train()(*inputs)


def build() -> nn.Module:
    torch.manual_seed(0)
    module = Generator()
    settle(module, torch.randn(16, 3, 32, 32))
    with torch.no_grad():
        module.paint.weight.mul_(0.5)  # mid tones: a random generator paints in pure black and white
    return module
