"""Small captured models that differ in what autocast has to do: nets, control flow, and ops that consist of others."""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.control_flow import CONTROL_FLOW
from tests.nets import NETS, Net, captured_net, normal
from tests.programs import Original, original

Forward = Callable[[Tensor, nn.Linear], Tensor]

FORWARDS: dict[str, Forward] = {
    "einsum": lambda x, f: torch.einsum("btd,de->bte", f(x), f.weight),
    "einsum of two": lambda x, f: torch.einsum("bid,bjd->bij", x, x * 2),
    "tensordot": lambda x, f: torch.tensordot(x, f.weight, 1),
    "inner": lambda x, f: torch.inner(x, f.weight),
    "matrix_power": lambda x, f: x + torch.linalg.matrix_power(f.weight, 3)[0],
    "cosine_similarity": lambda x, f: F.cosine_similarity(f(x), x, -1),
    "reflecting pad": lambda x, f: F.pad(f(x), (1, 1), mode="reflect"),
    "pairwise_distance": lambda x, f: F.pairwise_distance(f(x), x),
    "square": lambda x, f: torch.square(f(x)),
    "special softmax": lambda x, f: torch.special.softmax(f(x), -1),
    "norm": lambda x, f: torch.linalg.norm(f(x), dim=-1),
    "std": lambda x, f: f(x).std(-1),
    "attention": lambda x, f: F.scaled_dot_product_attention(f(x), x, x),
    "instance_norm": lambda x, f: F.instance_norm(f(x)),
    "chunk": lambda x, f: torch.cat(f(x).chunk(2, -1)),
    "pooling": lambda x, f: F.max_pool1d(F.adaptive_avg_pool1d(f(x), 2), 2),
}


class Around(nn.Module):
    """A net with a linear layer that makes half of FP32."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear, self._made = nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._made(x, self.linear)


COMPOSITES = {name: Net(partial(Around, forward), normal("x", 5, 4)) for name, forward in FORWARDS.items()}
SMALL = NETS | CONTROL_FLOW | COMPOSITES


@cache
def captured_small(name: str) -> Original:
    return captured_net(name) if name in NETS else original(SMALL[name].build(), SMALL[name].inputs(8))
