"""An op without a half kernel on the device stays FP32, in the device's own words."""

from typing import Any

import pytest
import torch
from halfeven.exporters.graph.actions import Action
from halfeven.exporters.torch.autocast.kernels import HalfKernels, keep_without_kernel
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable, walk
from torch import Tensor, nn

from tests.corpus import captured
from tests.nets import NETS, captured_net
from tests.programs import original
from tests.slow import slow_but


class Odd(nn.Module):
    """A product, then what a CPU has no half kernels for: one fails when it runs, one when it is inferred."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        return torch.special.bessel_j0(hidden) + hidden, torch.fft.rfft(hidden).abs()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_has_no_half_kernel_stays_fp32_and_says_what_the_device_said(level: str) -> None:
    model = original(Odd(), {"x": torch.randn(8, 4)})
    module = runnable(model.program)
    plan = keep_without_kernel(module, make_plan(module, Precision(level)), model.example)
    kept = {one.op: one for one in plan.kept}
    assert set(kept) == {"special_bessel_j0", "fft_rfft"}
    assert {one.reason for one in plan.kept} == {"no half kernel on cpu"}
    assert "not implemented for 'Half'" in kept["special_bessel_j0"].evidence and kept["fft_rfft"].evidence
    assert plan.actions[kept["fft_rfft"].node] is Action.FP32
    half = rewrite(model.program, plan, model.spec, model.example, module)
    x = torch.randn(3, 4)
    with torch.inference_mode():
        for one, other in zip(runnable(half.program)(x), model.run(x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", slow_but({"O3"}, ["O1", "O3"]))
@pytest.mark.parametrize("name", NETS)
def test_what_has_kernels_is_left_alone(name: str, level: str) -> None:
    model = captured_net(name)
    module = runnable(model.program)
    plan = make_plan(module, Precision(level))
    assert keep_without_kernel(module, plan, model.example) == plan


def test_an_op_that_is_given_fp32_is_not_asked_about() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    model = original(Wide(), {"x": torch.randn(8, 4)})
    module = runnable(model.program)
    assert keep_without_kernel(module, make_plan(module, Precision()), model.example).kept == ()


class FakeKernels(HalfKernels):
    """A device that says of each operation whether it has a half kernel."""

    def __init__(self, *lacking: str) -> None:
        super().__init__(torch.device("cuda:0"))
        self.lacking, self.asked = lacking, list[str]()

    def raised(self, call: Any, instead: torch.dtype | None) -> str:
        self.asked.append(call.op_name)
        return (
            f"\"{call.op_name}\" not implemented for 'Half'"
            if call.op_name in self.lacking and not instead
            else ""
        )


def test_each_device_has_its_own_kernels_and_is_asked_once_for_each_kind() -> None:
    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(self.linear(self.linear(x)))

    model = original(Bessel(), {"x": torch.randn(8, 4)})
    module = runnable(model.program)

    def kept(kernels: HalfKernels) -> dict[str, str]:
        plan = keep_without_kernel(module, make_plan(module, Precision("O3")), model.example, kernels)
        return {one.op: one.reason for one in plan.kept}

    assert kept(HalfKernels(torch.device("cpu"))) == {"special_bessel_j0": "no half kernel on cpu"}
    assert kept(FakeKernels()) == {}
    there = FakeKernels("linear")
    assert kept(there) == {"linear": "no half kernel on cuda"}
    asked = len(there.asked)
    assert kept(there) == {"linear": "no half kernel on cuda"} and len(there.asked) == asked


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_recurrent_layer_is_half_where_the_plan_may_and_the_device_has_the_kernel(level: str) -> None:
    model = captured("lstm")
    module = runnable(model.program)

    def action(half_loops: bool, kernels: HalfKernels) -> Action:
        plan = make_plan(module, Precision(level), half_loops=half_loops)
        plan = keep_without_kernel(module, plan, model.example, kernels)
        return next(
            plan.actions[name] for name, node in walk(module) if str(node.target) == "aten.lstm.input"
        )

    assert FakeKernels().of_loops and not HalfKernels(torch.device("cpu")).of_loops
    assert action(True, FakeKernels()) is Action.HALF
    assert action(True, FakeKernels("lstm")) is Action.FP32
    assert action(False, FakeKernels()) is Action.FP32


class Scattered(nn.Module):
    """One of each way to scatter: two that ONNX writes with a reduction, and two without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.linear(x)
        at = torch.zeros_like(hidden, dtype=torch.int64)
        rows = torch.zeros(x.shape[0], dtype=torch.int64)
        return (
            torch.zeros_like(hidden).scatter_add(1, at, hidden),
            torch.zeros_like(hidden).index_put((rows,), hidden, accumulate=True),
            torch.zeros_like(hidden).scatter(1, at, hidden),
            torch.zeros_like(hidden).index_put((torch.arange(x.shape[0]),), hidden),
        )


@pytest.mark.parametrize(("onnx", "kept"), [(True, {"scatter_add", "index_put"}), (False, set())])
def test_what_scatters_and_reduces_stays_fp32_for_onnx_alone(onnx: bool, kept: set[str]) -> None:
    model = original(Scattered(), {"x": torch.randn(8, 4)})
    module = runnable(model.program)
    plan = keep_without_kernel(module, make_plan(module, Precision("O3")), model.example, onnx=onnx)
    assert {one.op for one in plan.kept} == kept and len(plan.kept) == len(kept)
