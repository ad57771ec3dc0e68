"""A U-Net with resizing: a picture ``[N,3,H,W]`` (sides divisible by 4) to a mask ``[N,1,H,W]`` of logits.

Ronneberger, Fischer, Brox (2015); bilinear upsampling and GroupNorm instead of transposed convolutions and none.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = stage(3, width), stage(width, 2 * width)
        self.bottom = stage(2 * width, 4 * width)
        self.up2, self.up1 = stage(6 * width, 2 * width), stage(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        middle = self.down2(F.max_pool2d(fine, 2))
        hidden = self.bottom(F.max_pool2d(middle, 2))
        hidden = self.up2(torch.cat([self.resize(hidden), middle], 1))
        return self.head(self.up1(torch.cat([self.resize(hidden), fine], 1)))

    @staticmethod
    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def build() -> nn.Module:
    torch.manual_seed(0)
    return UNet()
