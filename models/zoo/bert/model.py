"""An encoder of the BERT type: learned positions, padding masks, post-norm blocks, a pooled first token.

Devlin et al. (2019). The mask is added as the least FP32 number, as is usual: half has no such number.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = torch.softmax(scores + bias, dim=-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width, eps=1e-12)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, bias))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))


class Bert(nn.Module):
    def __init__(
        self, words: int = 1000, longest: int = 64, width: int = 64, heads: int = 4, blocks: int = 2
    ):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.pool = nn.Linear(width, width)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.norm(self.words(input_ids) + self.places(places) + self.types(token_type_ids))
        bias = (1.0 - attention_mask[:, None, None, :].float()) * LEAST
        for block in self.blocks:
            hidden = block(hidden, bias)
        return hidden, torch.tanh(self.pool(hidden[:, 0]))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Bert()
