"""A causal decoder of the GPT type: pre-norm blocks, learned positions, the embedding once more as the head.

Radford et al. (2019). Ids ``[N,L]`` to logits ``[N,L,words]``; place i sees the places up to i.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, words: int = 256, longest: int = 64, width: int = 64, heads: int = 4, blocks: int = 3):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.words.weight)


def build() -> nn.Module:
    torch.manual_seed(0)
    module = GPT()
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.05)
    nn.init.normal_(module.words.weight, std=0.3)
    nn.init.normal_(module.places.weight, std=0.05)
    return module
