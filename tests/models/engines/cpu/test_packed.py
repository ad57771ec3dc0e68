"""Packed weights: the same answers, fewer and faster operations, nothing in memory twice."""

from typing import Any

import pytest
import torch
from halfeven.models.engines.cpu.packed import pack_weights
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.nets import NETS, captured_net
from tests.programs import original

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's")


def packed(net: nn.Module, *shape: int) -> tuple[GraphModule, list[str]]:
    """The program after packing, its answers compared with those of before, and the ops of its graph."""
    captured = original(net.eval(), {"input": torch.randn(8, *shape)})
    module = runnable(captured.program)
    pack_weights(module)
    for rows in (1, 5):
        x = torch.randn(rows, *shape)
        before = x.clone()
        with torch.inference_mode():
            torch.testing.assert_close(module(x)[0], captured.run(x)[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(x, before)
    return module, [
        str(node.target).removeprefix("aten.").removeprefix("mkldnn.")
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NETS))
def test_packing_changes_no_answer(name: str) -> None:
    net = NETS[name]
    captured = captured_net(name)
    plain, module = runnable(captured.program), runnable(captured.program)
    pack_weights(module)
    for rows in (1, 5):
        inputs = list(net.inputs(rows).values())
        with torch.inference_mode():
            for one, other in zip(plain(*inputs), module(*inputs), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


def randomised(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """The norm with statistics of its own, so that a norm that is left out would be seen."""
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.2, 3.0)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Conv2d(4, 8, 3, 2, 1, bias=False), randomised(nn.BatchNorm2d(8)), nn.ReLU()],
        lambda: [nn.Conv2d(4, 8, (3, 1), (1, 2), (1, 0)), randomised(nn.BatchNorm2d(8, eps=0.1)), nn.ReLU()],
        lambda: [nn.Conv2d(4, 8, 3, groups=2), randomised(nn.BatchNorm2d(8, affine=False)), nn.ReLU()],
        lambda: [nn.Conv2d(4, 4, 3, dilation=2, groups=4), nn.GELU()],
        lambda: [nn.Conv2d(4, 8, 3), nn.GELU(approximate="tanh")],
        lambda: [nn.Conv2d(4, 8, 1)],
    ],
)
def test_a_convolution_takes_its_norm_and_its_activation_along(layers: Any) -> None:
    _, ops = packed(nn.Sequential(*layers()), 4, 9, 11)
    assert [op for op in ops if op != "relu.default"] == ["_convolution_pointwise.default"]


class Residual(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = randomised(nn.BatchNorm2d(8))
        self.around = nn.Conv2d(4, 8, 1)

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(self.around(input) + self.norm(self.one(input)))


def test_a_residual_sum_is_done_by_the_convolution() -> None:
    _, ops = packed(Residual(), 4, 6, 6)
    assert sorted(ops) == ["_convolution_pointwise.binary", "_convolution_pointwise.default", "relu.default"]


class Broadcast(Residual):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(self.one(input) + self.around(input).mean((2, 3), keepdim=True))


def test_a_sum_that_is_broadcast_stays_a_sum() -> None:
    _, ops = packed(Broadcast(), 4, 6, 6)
    assert "add.Tensor" in ops and "_convolution_pointwise.binary" not in ops


class ReadTwice(Residual):
    def forward(self, input: Tensor) -> Tensor:
        once = self.one(input)
        return torch.relu(once) + self.norm(once)


def test_what_is_read_again_is_not_fused_away() -> None:
    _, ops = packed(ReadTwice(), 4, 6, 6)
    assert "relu.default" in ops and "batch_norm.default" in ops and "_convolution_pointwise.default" in ops


@pytest.mark.parametrize(("activation", "left"), [(nn.ReLU(), 1), (nn.GELU(), 0), (nn.Tanh(), 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_takes_its_activation_along(activation: nn.Module, left: int, bias: bool) -> None:
    module, ops = packed(nn.Sequential(nn.Linear(384, 512, bias=bias), activation), 3, 384)
    assert ops[0] == "_linear_pointwise.default" and len(ops) == 1 + left
    plain = [tensor for tensor in module.state_dict().values() if tensor.numel() == 384 * 512]
    assert not plain, "the weight is in memory twice"


class Wide(nn.Module):
    """A net of everything that is packed, one layer behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.residual, self.tail = Residual(), nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.one, self.two = nn.Linear(8 * 16, 1024), nn.Linear(1024, 1024)
        self.three = nn.Linear(1024, 256)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.tail(self.residual(input)).flatten(1)
        hidden = functional.gelu(self.two(torch.relu(self.one(hidden))))
        return torch.relu(self.three(functional.gelu(hidden, approximate="tanh")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_made_finite(dtype: torch.dtype, poison: float) -> None:
    """A row that overflowed must be seen: oneDNN's own ReLU would answer 0 for NaN."""
    net = Wide().eval().to(dtype)
    captured = original(net, {"input": torch.randn(8, 4, 6, 6).to(dtype)})
    module = runnable(captured.program)
    pack_weights(module)
    assert "mkldnn._linear_pointwise.default" in {str(node.target) for node in module.graph.nodes}
    x = torch.randn(5, 4, 6, 6).to(dtype)
    x[2, 1, 3, 3] = poison
    with torch.inference_mode():
        (found,) = module(x)
    (expected,) = captured.run(x)
    assert torch.equal(found.isnan(), expected.isnan()) and found[2].isnan().any()
    assert torch.isfinite(found[[0, 1, 3, 4]]).all()


def test_a_small_fp32_layer_stays_as_it_is() -> None:
    _, ops = packed(nn.Linear(64, 64), 64)
    assert ops == ["linear.default"]


class Addmm(nn.Module):
    """A product as in GPT-2, with a weight that is not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(384, 512) / 20), nn.Parameter(torch.randn(512))

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(torch.addmm(self.bias, input, self.weight), approximate="tanh")


def test_a_product_with_a_bias_is_a_linear_layer() -> None:
    _, ops = packed(Addmm(), 384)
    assert ops == ["_linear_pointwise.default"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(400, 400), nn.Linear(400, 400)
        self.other.weight = self.one.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.other(self.one(input))


def test_a_tied_weight_stays_as_it_is() -> None:
    _, ops = packed(Tied(), 400)
    assert ops == ["linear.default"] * 2


def test_a_half_keeps_its_rounded_weights_and_its_norm() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bf16 kernels")
    net = nn.Sequential(nn.Conv2d(4, 8, 3), randomised(nn.BatchNorm2d(8)), nn.ReLU()).eval().bfloat16()
    example = {"input": torch.randn(8, 4, 6, 6).bfloat16()}
    captured = original(net, example)
    module = runnable(captured.program)
    pack_weights(module)
    ops = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert "aten.batch_norm.default" in ops and "mkldnn._convolution_pointwise.default" in ops
    x = torch.randn(5, 4, 6, 6).bfloat16()
    with torch.inference_mode():
        found = module(x)[0]
    torch.testing.assert_close(found, captured.run(x)[0], rtol=2**-7, atol=2**-7)
