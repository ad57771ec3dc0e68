"""A decoder of the Llama type: RMSNorm, rotary positions, grouped keys, a gated MLP. Touvron et al. (2023).

The norm goes up to FP32 and back, and the angles are made with autocast off: islands that a conversion must keep.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, each = heads, shared, width // heads
        self.q, self.k, self.v = (nn.Linear(width, n * each, bias=False) for n in (heads, shared, shared))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.split(self.q(x), self.heads), cos, sin)
        key = rotate(self.split(self.k(x), self.shared), cos, sin)
        groups = self.heads // self.shared
        key, value = (t.repeat_interleave(groups, 1) for t in (key, self.split(self.v(x), self.shared)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, shared)
        self.gate, self.up, self.down = (
            nn.Linear(i, o, bias=False)
            for i, o in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        hidden = self.norm2(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Llama(nn.Module):
    def __init__(self, words: int = 256, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, heads // 2) for _ in range(blocks))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        each = width // heads
        frequencies = 10000.0 ** -(torch.arange(0, each, 2).float() / each)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(length, device=self.words.weight.device).float()
        with torch.autocast(self.words.weight.device.type, enabled=False):
            angle = places[:, None] @ self.get_buffer("frequencies")[None, :]
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        cos, sin = self.angles(input_ids.shape[1])
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return self.head(self.norm(hidden))


def build() -> nn.Module:
    torch.manual_seed(0)
    module = Llama()
    nn.init.normal_(module.words.weight, std=0.3)
    return module
