"""Composite ops are opened where the lists act inside them, and nowhere else; FP32 stays FP32 bit for bit."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.torch.autocast.plan import make_plan, op_name
from halfeven.exporters.torch.autocast.policy import LISTS
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.exporters.torch.autocast.surgery import open_composites
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule

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
OPENED = {
    "cpu": {"einsum", "einsum of two", "tensordot", "inner", "matrix_power", "reflecting pad"},
    "cuda": {"inner", "matrix_power", "pairwise_distance", "square", "special softmax", "norm"},
}


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear, self._made = nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._made(x, self.linear)


def captured(name: str) -> Original:
    return original(Net(FORWARDS[name]), {"x": torch.randn(8, 5, 4)})


def ops(module: GraphModule) -> list[str]:
    return [op_name(node) for node in module.graph.nodes if isinstance(node.target, OpOverload)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARDS)
def test_the_half_program_is_bit_equal_to_live_autocast(name: str) -> None:
    model = captured(name)
    module = open_composites(runnable(model.program), LISTS["cpu"])
    half = rewrite(model.program, make_plan(module, Precision(), "cpu"), model.spec, model.example, module)
    before, after = runnable(model.program), runnable(half.program)
    for rows in (1, 3, 6):
        x = torch.randn(rows, 5, 4)
        with torch.inference_mode():
            with torch.autocast("cpu", dtype=torch.float16):
                expected = before(x)[0]
            assert torch.equal(expected.float(), after(x)[0])


@pytest.mark.parametrize("lists", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FORWARDS)
def test_only_that_is_opened_in_which_the_lists_act_and_fp32_stays_the_same(name: str, lists: str) -> None:
    model = captured(name)
    before, after = runnable(model.program), open_composites(runnable(model.program), LISTS[lists])
    assert (ops(before) != ops(after)) == (name in OPENED[lists])
    x = torch.randn(6, 5, 4)
    with torch.inference_mode():
        assert torch.equal(before(x)[0], after(x)[0])


def test_a_square_is_a_power_and_so_fp32_on_cuda() -> None:
    module = open_composites(runnable(captured("square").program), LISTS["cuda"])
    assert ops(module) == ["linear", "pow"]
    assert make_plan(module, Precision()).actions["square_pow_1"].value == "fp32"


def test_the_ops_of_a_composite_have_its_module_and_are_kept_by_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Net(FORWARDS["einsum of two"])

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

    module = runnable(original(Outer(), {"x": torch.randn(8, 5, 4)}).program)
    open_composites(module, LISTS["cpu"])
    kept = make_plan(module, Precision(keep=("inside",)), "cpu").kept
    assert "einsum_bmm" in {one.node for one in kept}
