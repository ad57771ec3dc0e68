"""Faults under CUDA autocast are found in a program that is not run; operators that it has in FP32 are not named."""

import torch
from halfeven.exporters.torch.autocast.half_faults import (
    BANNED_OPERATION,
    LARGE_MASK,
    SMALL_GUARD,
    half_faults,
)
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def scores(self, x: Tensor) -> Tensor:
        return self.q(x) @ self.k(x).transpose(-1, -2)


class Faulty(Net):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(x)
        half = scores / (scores.abs().mean(-1, keepdim=True) + 1e-8)
        log = torch.log(torch.sigmoid(scores) + 1e-8)
        loss = F.binary_cross_entropy(torch.sigmoid(half), mask.float(), reduction="none")
        return scores.masked_fill(mask == 0, -1e9), torch.where(mask > 0, scores, -1e30), log, loss


class Sound(Net):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(x)
        weights = scores.masked_fill(mask == 0, -6e4).softmax(-1)
        endless = scores.masked_fill(mask == 0, float("-inf"))
        wide = (weights * 2).masked_fill(mask == 0, -1e9)  # a softmax is FP32
        sums = weights / (weights.sum(-1, keepdim=True) + 1e-8)
        held = scores / (scores.abs().mean(-1, keepdim=True) + 1e-6)
        plain = scores + 1e-8  # guards nothing
        logits = F.binary_cross_entropy_with_logits(scores, mask.float(), reduction="none")
        return endless, wide, sums, held, plain, logits


def found(module: nn.Module, dtype: str = "fp16") -> list[tuple[str, str]]:
    example = (torch.randn(2, 5, 8), torch.randint(0, 2, (2, 5, 5)))
    program = torch.export.export(module.eval(), example)
    return [(fault.code, fault.op) for fault in half_faults(program, example, dtype)]


def test_banned_operations_masks_beyond_half_and_guards_below_it_are_named() -> None:
    assert found(Faulty()) == [
        (SMALL_GUARD, "add"),
        (SMALL_GUARD, "add"),
        (BANNED_OPERATION, "binary_cross_entropy"),
        (LARGE_MASK, "masked_fill"),
        (LARGE_MASK, "where"),
    ]


def test_bf16_holds_these_numbers_and_bans_the_same_operation() -> None:
    assert found(Faulty(), "bf16") == [(BANNED_OPERATION, "binary_cross_entropy")]


def test_what_autocast_has_in_fp32_and_numbers_that_half_holds_are_not_named() -> None:
    assert found(Sound()) == []
