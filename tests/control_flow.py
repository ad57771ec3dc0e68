"""Small nets with control flow that torch.export captures: branches, loops, scans and maps, and nests of them."""

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from tests.nets import Net, normal


class Branches(nn.Module):
    """Two branches that both end in half; each has a weight of its own, and one is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cond(
            x.sum() > 0,
            lambda x: torch.relu(self.shared(self.one(x))),
            lambda x: torch.tanh(self.shared(self.other(x))),
            (x,),
        )
        return self.shared(hidden)


class Uneven(nn.Module):
    """One branch ends in half, the other in FP32: the result is FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x * 2.0, (x,)))


class Loop(nn.Module):
    """State that each turn makes in half, from FP32; the weight is also read in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def body(turn: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return turn + 1, torch.tanh(self.linear(state)) + self.linear.weight[0]

        return while_loop(lambda turn, state: turn < 3, body, (torch.zeros((), dtype=torch.int64), x))[1]


class Recurrent(nn.Module):
    """A scan over time: a state, and an output for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.given = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.hidden(state) + self.given(row))
            return state, state * 2.0

        last, each_step = scan(step, x.new_zeros(x.shape[0], 4), x.transpose(0, 1).contiguous())
        return last, each_step.transpose(0, 1)


class Mapped(nn.Module):
    """A model that gives every sample to one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return each(lambda row, *_: torch.relu(self.linear(row)), x)


class Nested(nn.Module):
    """A branch in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def body(turn: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.cond(
                state.sum() > 0, lambda s: self.one(s) + 1.0, lambda s: self.other(s).exp(), (state,)
            )
            return turn + 1, state

        return while_loop(lambda turn, state: turn < 2, body, (torch.zeros((), dtype=torch.int64), x))[1]


CONTROL_FLOW: dict[str, Net] = {
    "branches": Net(Branches, normal("x", 4)),
    "uneven": Net(Uneven, normal("x", 4)),
    "loop": Net(Loop, normal("x", 4)),
    "recurrent": Net(Recurrent, normal("x", 5, 3)),
    "mapped": Net(Mapped, normal("x", 4)),
    "nested": Net(Nested, normal("x", 4)),
}
