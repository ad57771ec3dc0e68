"""Traps of rounding: every number is in range, but eleven bits are too few where two of them meet."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, linear, net, normal, scaled_rows


def mean_of_squares(self, x: Tensor) -> Tensor:
    hidden = self.embed(x) + 20.0
    mean = hidden.mean(-1, keepdim=True)
    variance = (hidden * hidden).mean(-1, keepdim=True) - mean * mean
    return self.head((hidden - mean) / torch.sqrt(variance + 1e-3))


def nearly_equal(self, x: Tensor) -> Tensor:
    return self.head((self.one(x) - self.two(x)) * 1e2)


def nearly_equal_parts() -> dict[str, nn.Module]:
    one, two = linear(32, 64), linear(32, 64)
    with torch.no_grad():
        two.weight.mul_(1e-2).add_(one.weight)
    return {"one": one, "two": two, "head": linear(64, 8)}


def cosine(self, x: Tensor) -> Tensor:
    return self.head(F.cosine_similarity(self.embed(x).unsqueeze(1), self.prototypes, dim=-1))


def angular_distance(self, x: Tensor) -> Tensor:
    """1 − cos of an angle of a fifth: 0.02."""
    hidden = F.normalize(self.embed(x), dim=-1)
    moved = F.normalize(self.embed(x + 0.2 * self.move(x)), dim=-1)
    return (1.0 - (hidden.unsqueeze(1) @ moved.unsqueeze(2)).flatten(1)) * 1e2


def waves(self, x: Tensor) -> Tensor:
    angle = self.project(x)
    return self.head(torch.cat([angle.sin(), angle.cos()], -1))


def far_from_zero(self, x: Tensor) -> Tensor:
    """A sharp choice between two scores that are both near 2,000."""
    return torch.softmax(self.scores(x) + self.shift(x).abs() * 1000.0 + 1000.0, -1)


def slow_average(self, x: Tensor) -> Tensor:
    state = self.embed(x) + 30.0
    for step in range(2):
        state = state + 1e-4 * (self.step(x) * (step + 1) - state)
    return self.head((state - 30.0) * 10.0)


def detector(self, image: Tensor) -> Tensor:
    """Boxes in pixels, an objectness around 1e-3 and class scores, in one tensor as detectors give them."""
    found = self.head(F.silu(self.body(image))).flatten(2).transpose(1, 2)
    boxes, score, classes = found.split([4, 1, 3], -1)
    centre = (boxes[..., :2].sigmoid() + self.grid) * 80.0
    size = boxes[..., 2:].exp() * 40.0
    return torch.cat([centre, size, 1.0 - torch.sigmoid(score + 6.5), classes.softmax(-1)], -1)


def grid() -> Tensor:
    return torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="xy"), -1).reshape(64, 2)


def bins(self, x: Tensor) -> Tensor:
    """A soft histogram of 64 narrow bins."""
    place = torch.sigmoid(self.embed(x)).unsqueeze(-1)
    return self.head(torch.exp(-(((place - self.centres) * 40.0) ** 2)).mean(1))


def polynomial(self, x: Tensor) -> Tensor:
    """(h − 1)³ multiplied out."""
    hidden = 1.0 + 0.3 * torch.tanh(self.embed(x))
    power = hidden * hidden
    return self.head((power * hidden - 3.0 * power + 3.0 * hidden - 1.0) * 100.0)


CASES = {
    "mean of squares": Case(
        lambda: net(mean_of_squares, embed=linear(32, 64), head=linear(64, 8)),
        normal(32),
        "a variance as E[x²] − E[x]² around a mean of 20",
    ),
    "nearly equal": Case(
        lambda: net(nearly_equal, **nearly_equal_parts()),
        normal(32),
        "the difference of two layers whose weights differ by a hundredth",
    ),
    "cosine similarity": Case(
        lambda: net(cosine, embed=linear(32, 64), head=linear(10, 4), prototypes=torch.randn(10, 64)),
        scaled_rows(32, 1e-6),
        "similarities of rows of 1e-6, which are subnormal in half",
        ("tensor",),
    ),
    "angular distance": Case(
        lambda: net(angular_distance, embed=linear(32, 64), move=linear(32, 32)),
        normal(32),
        "1 − cosine of nearly parallel vectors: 0.02 is left of a product near 1",
    ),
    "large angles": Case(
        lambda: net(waves, project=linear(32, 64, 500.0), head=linear(128, 8)),
        normal(32),
        "sine and cosine of 500, where half has steps of 0.5",
    ),
    "far from zero": Case(
        lambda: net(far_from_zero, scores=linear(32, 5), shift=linear(32, 1)),
        normal(32),
        "softmax of numbers around 2,000 that differ by 1",
        ("probabilities",),
    ),
    "slow average": Case(
        lambda: net(slow_average, embed=linear(32, 64), step=linear(32, 64), head=linear(64, 8)),
        normal(32),
        "steps of 1e-4 are lost on a state of 30",
    ),
    "detector": Case(
        lambda: net(detector, body=nn.Conv2d(3, 16, 3, padding=1), head=nn.Conv2d(16, 8, 1), grid=grid()),
        normal(3, 8, 8, name="image"),
        "boxes to 640 and, by cancellation, scores of 1e-3 in one output: measured against boxes no score is wrong",
    ),
    "narrow bins": Case(
        lambda: net(bins, embed=linear(32, 64), head=linear(64, 8), centres=torch.linspace(0, 1, 64)),
        normal(32),
        "bins a fortieth wide: a rounding of their place is forty times as large in them, and squared",
    ),
    "polynomial": Case(
        lambda: net(polynomial, embed=linear(32, 64), head=linear(64, 8)),
        normal(32),
        "(h − 1)³ multiplied out: numbers around 3 cancel to a thousandth",
    ),
}
