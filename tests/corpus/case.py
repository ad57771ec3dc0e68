"""One model of the corpus, and the few words in which its models are written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from halfeven.models.spec.spec import Dim
from torch import Tensor, nn

from tests.nets import Net

Forward = Callable[..., Any]  # forward(self, *inputs by name)


@dataclass(frozen=True)
class Case(Net):
    """A net with what a conversion must know of it.

    ``inputs(rows)`` draws fresh ones from torch's global generator; 32 rows hold every special row (zero,
    tiny, fully masked) that the trap needs. ``trap`` says what goes wrong in half; a healthy net has none.
    ``harmless``: it only looks wrong; autocast's lists alone give a half that is equal.
    ``hopeless``: what would have to stay FP32 is all there is, so it is to be refused.
    ``kinds``: one per output (none: all ``tensor``). ``free``: further free axes of all inputs that have them.
    """

    trap: str = ""
    kinds: tuple[str, ...] = ()
    free: Mapping[int, Dim] = field(default_factory=dict)
    max_batch_size: int = 8
    harmless: bool = False
    hopeless: bool = False


class _Made(nn.Module):
    """A module of one function and its parts: modules, parameters (tensors that are leaves), buffers."""

    def __init__(self, parts: Mapping[str, Tensor | nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)


def net(forward: Forward, **parts: Tensor | nn.Module) -> nn.Module:
    """A module whose forward is ``forward(self, …)``; tensors that are no parameters become buffers."""
    return type("Made", (_Made,), {"forward": forward})(parts)


def linear(inputs: int, outputs: int, gain: float = 1.0, bias: bool = False) -> nn.Linear:
    """A layer that makes normal numbers ``gain`` times as large."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


def normal(*shape: int, name: str = "x", gain: float = 1.0) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: gain * torch.randn(rows, *shape)}


def ids(*shape: int, name: str = "ids", below: int = 100) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {name: torch.randint(0, below, (rows, *shape))}


def scaled_rows(width: int, *scales: float) -> Callable[[int], dict[str, Tensor]]:
    """Normal rows; of every three the last ones are multiplied by ``scales`` (0 makes zero rows).

    Three, so that even and odd rows hold all of them: the one plan a conversion, the others judge it.
    """
    factors = torch.tensor([1.0] * (3 - len(scales)) + list(scales))

    def draw(rows: int) -> dict[str, Tensor]:
        return {"x": torch.randn(rows, width) * factors[torch.arange(rows) % 3].unsqueeze(1)}

    return draw


def masked(length: int, width: int, empty: bool) -> Callable[[int], dict[str, Tensor]]:
    """``x`` [rows, length, width] and a 0/1 ``mask`` [rows, length]; every third mask is empty if ``empty``."""

    def draw(rows: int) -> dict[str, Tensor]:
        kept = torch.randint(1, length + 1, (rows, 1))
        kept[2::3] *= not empty
        return {"x": torch.randn(rows, length, width), "mask": (torch.arange(length) < kept).long()}

    return draw
