"""Attention and its masks: sentinels of every size, rows that are masked altogether, positions to 4,095."""

import torch
import torch.nn.functional as F
from halfeven.models.spec.spec import Dim
from torch import Tensor, nn

from .case import Case, Forward, linear, masked, net

LENGTH, WIDTH, HEADS = 12, 32, 4
LEAST = torch.finfo(torch.float32).min


def attention(mix: Forward) -> nn.Module:
    """Projections around ``mix(self, query, key, value, mask)`` → [rows, heads, length, width]; mask is 0/1."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(mix(self, query, key, value, mask[:, None, None, :]).transpose(1, 2).flatten(2))

    return net(forward, **projections())


def projections() -> dict[str, nn.Module]:
    return {name: linear(WIDTH, WIDTH, bias=True) for name in ("query", "key", "value", "out")}


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5


def filled(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores_of(query, key).masked_fill(mask == 0, LEAST), -1) @ value


def added(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores_of(query, key) + (1.0 - mask.float()) * LEAST, -1) @ value


def chosen(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask == 1, scores_of(query, key), -1e9), -1) @ value


def infinite(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(scores_of(query, key).masked_fill(mask == 0, float("-inf")), -1)
    return torch.nan_to_num(weights) @ value


def half_added(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The mask is made in the scores' dtype, as transformers' ``get_extended_attention_mask`` does."""
    scores = scores_of(query, key)
    return torch.softmax(scores + (1.0 - mask.to(scores.dtype)) * -1e9, -1) @ value


def fused_bool(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.bool())


def fused_float(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(mask == 0, LEAST)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def causal(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    earlier = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    weights = torch.softmax(torch.where(earlier, scores_of(query, key), torch.tensor(LEAST)), -1)
    return weights * mask @ value


def relative(self, x: Tensor) -> Tensor:
    """A learned float bias by distance, as T5 and Swin have it; with a free batch it is a trap for exporters."""
    query, key, value = (
        layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
    )
    places = torch.arange(x.shape[1])
    bias = self.distances((places[:, None] - places[None, :]).clamp(-8, 8) + 8).permute(2, 0, 1)
    return self.out(
        F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
    )


def pointer(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of places, with a sentinel where there is none, and their softmax."""
    scores = self.head(torch.tanh(self.embed(x))).squeeze(-1).masked_fill(mask == 0, -1e9)
    return scores, torch.softmax(scores, -1)


def masked_pool(self, x: Tensor, mask: Tensor) -> Tensor:
    """Largest and mean over the places that count; an empty mask leaves the sentinel and divides by 1e-9."""
    hidden, kept = self.embed(x), mask.unsqueeze(-1)
    largest = hidden.masked_fill(kept == 0, -1e9).amax(1).clamp(min=-10.0)
    mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
    return self.head(torch.cat([largest, mean], -1))


# Positions.


def placed(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, LENGTH, WIDTH), "positions": torch.randint(0, 4096, (rows, LENGTH))}


def frequencies(count: int) -> Tensor:
    return 1e4 ** -(torch.arange(count) / count)


def sinusoidal(self, x: Tensor, positions: Tensor) -> Tensor:
    angle = positions.unsqueeze(-1).float() * self.frequencies
    return self.head(self.embed(x) + torch.cat([angle.sin(), angle.cos()], -1))


def sinusoidal_table(self, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(torch.tanh(self.embed(x) + self.table[positions]))


def table() -> Tensor:
    angle = torch.arange(4096.0).unsqueeze(1) * frequencies(WIDTH // 2)
    return torch.cat([angle.sin(), angle.cos()], 1)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def rotary(self, x: Tensor, positions: Tensor) -> Tensor:
    """The angles are a matrix product, as in transformers, but without the island that protects them there."""
    angle = positions.unsqueeze(-1).float() @ self.frequencies.unsqueeze(0)
    query, key = rotate(self.query(x), angle), rotate(self.key(x), angle)
    return torch.softmax(query @ key.transpose(1, 2) / WIDTH**0.5, -1) @ self.value(x)


def rotary_parts() -> dict[str, nn.Module]:
    return {name: linear(WIDTH, WIDTH) for name in ("query", "key", "value")}


def position_parts() -> dict[str, nn.Module]:
    return {"embed": linear(WIDTH, WIDTH), "head": linear(WIDTH, 8)}


EMPTY = masked(LENGTH, WIDTH, empty=True)
SOME = masked(LENGTH, WIDTH, empty=False)

CASES = {
    "least float filled": Case(
        lambda: attention(filled),
        EMPTY,
        "masked_fill with −3.4e38 and rows masked altogether (uniform in FP32)",
    ),
    "least float added": Case(
        lambda: attention(added),
        EMPTY,
        "(1 − mask) · −3.4e38, made and added in FP32, rows masked altogether: nothing need be kept",
        harmless=True,
    ),
    "-1e9 chosen": Case(
        lambda: attention(chosen), EMPTY, "where(mask, scores, −1e9), rows masked altogether"
    ),
    "-1e9 in the scores' dtype": Case(
        lambda: attention(half_added),
        EMPTY,
        "0 · −1e9 is NaN if −1e9 becomes −inf before the product",
        harmless=True,
    ),
    "infinity rescued": Case(
        lambda: attention(infinite),
        EMPTY,
        "softmax of −inf alone is NaN, and nan_to_num makes it 0: in half as well",
        harmless=True,
    ),
    "fused attention, bool mask": Case(lambda: attention(fused_bool), SOME),
    "fused attention, float mask": Case(
        lambda: attention(fused_float),
        SOME,
        "a float bias of −3.4e38 made in the query's dtype",
        harmless=True,
    ),
    "causal": Case(lambda: attention(causal), SOME, "a constant triangle of −3.4e38", harmless=True),
    "relative bias": Case(
        lambda: net(relative, **projections(), distances=nn.Embedding(17, HEADS)),
        lambda rows: {"x": torch.randn(rows, LENGTH, WIDTH)},
        free={1: Dim(2, 32)},
    ),
    "pointer": Case(
        lambda: net(pointer, embed=linear(WIDTH, 64), head=linear(64, 1, 3.0)),
        SOME,
        "the sentinel −1e9 is itself part of an answer",
        ("tensor", "probabilities"),
    ),
    "masked pooling": Case(
        lambda: net(masked_pool, embed=linear(WIDTH, 32), head=linear(64, 8)),
        EMPTY,
        "−1e9 under a maximum, and a count clamped at 1e-9",
    ),
    "sinusoidal positions": Case(
        lambda: net(sinusoidal, **position_parts(), frequencies=frequencies(16)),
        placed,
        "sines of angles to 4,095, where half has steps of 2; no product makes them, so FP32 they stay",
        harmless=True,
    ),
    "sinusoidal table": Case(
        lambda: net(sinusoidal_table, **position_parts(), table=table()),
        placed,
        "the same, read from a table: harmless",
        harmless=True,
    ),
    "rotary by a product": Case(
        lambda: net(rotary, **rotary_parts(), frequencies=frequencies(16)),
        placed,
        "angles to 4,095 come out of a matrix product, which the lists run in half",
    ),
}
