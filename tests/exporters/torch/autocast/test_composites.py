"""Composite ops are opened where the lists act inside them, and nowhere else; FP32 stays FP32 bit for bit."""

import pytest
import torch
from halfeven.exporters.torch.autocast.plan import make_plan, op_name
from halfeven.exporters.torch.autocast.policy import LISTS
from halfeven.exporters.torch.autocast.surgery import open_composites
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule

from tests.exporters.torch.autocast.small_models import FORWARDS, Around, captured_small
from tests.programs import original

OPENED = {
    "cpu": {"einsum", "einsum of two", "tensordot", "inner", "matrix_power", "reflecting pad"},
    "cuda": {"inner", "matrix_power", "pairwise_distance", "square", "special softmax", "norm"},
}


def ops(module: GraphModule) -> list[str]:
    return [op_name(node) for node in module.graph.nodes if isinstance(node.target, OpOverload)]


@pytest.mark.parametrize("lists", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FORWARDS)
def test_only_that_is_opened_in_which_the_lists_act_and_fp32_stays_the_same(name: str, lists: str) -> None:
    model = captured_small(name)
    before, after = runnable(model.program), open_composites(runnable(model.program), LISTS[lists])
    assert (ops(before) != ops(after)) == (name in OPENED[lists])
    x = torch.randn(6, 5, 4)
    with torch.inference_mode():
        assert torch.equal(before(x)[0], after(x)[0])


def test_a_square_is_a_power_and_so_fp32_on_cuda() -> None:
    module = open_composites(runnable(captured_small("square").program), LISTS["cuda"])
    assert ops(module) == ["linear", "pow"]
    assert make_plan(module, Precision()).actions["square_pow_1"].value == "fp32"


def test_the_ops_of_a_composite_have_its_module_and_are_kept_by_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Around(FORWARDS["einsum of two"])

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

    module = runnable(original(Outer(), {"x": torch.randn(8, 5, 4)}).program)
    open_composites(module, LISTS["cpu"])
    kept = make_plan(module, Precision(keep=("inside",)), "cpu").kept
    assert "einsum_bmm" in {one.node for one in kept}
