"""A vision transformer: 8×8 patches of ``[N,3,32,32]``, a class token, logits ``[N,10]``. Dosovitskiy et al. (2021)."""

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(0.1 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.patches(image).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(image.shape[0], -1, -1), hidden], 1) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.classify(self.norm(hidden)[:, 0])


def build() -> nn.Module:
    torch.manual_seed(0)
    return ViT()
