"""Scoring heads: what counts of their answers is the order of the rows, and that lives in the spread of the scores."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, linear, net, normal


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1; the guard is a number that half has, so that a row of zeros is no trap of its own."""
    return F.normalize(x, dim=-1, eps=1e-3)


def sigmoid(self, x: Tensor) -> Tensor:
    """Logits between 6 and 13: every score is above 0.997."""
    return torch.sigmoid(self.head(F.gelu(self.embed(x))))


def two_classes(self, x: Tensor) -> Tensor:
    return torch.softmax(self.head(F.gelu(self.embed(x))), -1)


def cosine(self, x: Tensor) -> Tensor:
    """Embeddings in a narrow cone, as trained ones are: similarities of 0.9 that differ by a hundredth."""
    hidden = F.gelu(self.embed(x)) * 0.1 + self.cone
    return unit(hidden) @ unit(self.query)


def dot_product(self, x: Tensor) -> Tensor:
    return self.embed(x) @ self.query


def max_similarity(self, x: Tensor) -> Tensor:
    """Late interaction: for every token of the query its best token of the candidate, added up."""
    tokens = unit(self.embed(x))
    return (tokens @ unit(self.query).t()).amax(1).sum(-1, keepdim=True)


def temperature(self, x: Tensor) -> Tensor:
    """A match or none: similarities over a temperature, as contrastive models have it."""
    similar = unit(self.embed(x)) @ unit(self.classes).t()
    return torch.softmax((similar + self.prior) / 0.1, -1)


def biased(inputs: int, *biases: float, gain: float = 1.0) -> nn.Linear:
    layer = linear(inputs, len(biases), gain, bias=True)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor(biases))
    return layer


CASES = {
    "sigmoid head": Case(
        lambda: net(sigmoid, embed=linear(32, 64), head=biased(64, 9.5, gain=2.0)),
        normal(32),
        "the sigmoid of logits between 6 and 13 is 1 in half for most of them",
        ("probabilities",),
    ),
    "two-class head": Case(
        lambda: net(two_classes, embed=linear(32, 64), head=biased(64, -4.5, 4.5, gain=1.5)),
        normal(32),
        "two classes nine apart: the likelier one is 1 in half for most rows, and a few of 200 change places",
        ("probabilities",),
    ),
    "cosine head": Case(
        lambda: net(cosine, embed=linear(32, 64), cone=torch.rand(64), query=torch.rand(64)),
        normal(32),
        "cosines of a narrow cone: half has steps of 5e-4 there",
        ("score",),
    ),
    "dot product head": Case(
        lambda: net(dot_product, embed=linear(32, 64), query=torch.randn(64)), normal(32), kinds=("score",)
    ),
    "max-similarity head": Case(
        lambda: net(max_similarity, embed=linear(32, 64), query=torch.randn(32, 64)),
        normal(12, 32),
        "a sum of 32 best similarities: half has steps of 8e-3 there, and candidates differ by little more",
        ("score",),
        harmless=True,
    ),
    "temperature head": Case(
        lambda: net(
            temperature,
            embed=linear(32, 64),
            classes=torch.randn(2, 64),
            prior=torch.tensor([0.9, 0.0]),
        ),
        normal(32),
        "a softmax of similarities over 0.1: the first class is 1 in half for most rows",
        ("probabilities",),
        harmless=True,
    ),
}
