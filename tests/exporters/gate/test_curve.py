"""Claims about the divergence curve: every node's error, and the first that goes astray."""

import json
import math

import pytest
import torch
from halfeven.exporters.gate import curve
from halfeven.exporters.gate.curve import divergence_curve
from halfeven.exporters.torch.autocast.dtypes import Typing
from halfeven.exporters.torch.autocast.emulation import Emulation, half_rounding, mantissa_rounding
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.program_graph import nodes_of
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn

U = 2.0**-11


def drift(net: nn.Module, rounding=half_rounding, level: str = "O3", **inputs: Tensor) -> curve.Curve:
    tensors = list(inputs.values())
    module = runnable(torch.export.export(net.eval(), (), inputs))
    typing = Typing(module, tensors)
    plans = [make_plan(module, Precision.parse(name, "fp16", (), "keep", "")) for name in ("O0", level)]
    fp32, half = (typing.under(plan) for plan in plans)
    round_half = rounding(torch.float16)
    return divergence_curve(
        nodes_of(module),
        lambda tap: Emulation(module, fp32, round_half, tap).run(*tensors),
        lambda tap: Emulation(module, half, round_half, tap).run(*tensors),
        U,
    )


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 100.0
        return self.last((hidden * hidden * 1000.0).mean(-1, keepdim=True) * 1e-6 + hidden)


def test_a_healthy_net_has_a_point_for_every_node_and_none_astray():
    found = drift(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), input=torch.randn(5, 8))
    assert [point.op for point in found.points] == ["linear", "tanh", "linear"]
    assert all(0 < point.error_u < 8 and not point.lost for point in found.points) and found.first is None


def test_the_first_node_that_overflows_is_named_and_not_those_behind_it():
    found = drift(Overflows(), x=torch.randn(5, 8) * 4)
    assert found.first is not None and found.first.lost and found.first.error_u == math.inf
    lost = [point.node for point in found.points if point.lost]
    assert found.first.node == lost[0] and len(lost) > 1 and found.first.op == "mul"


def test_with_the_exponent_of_fp32_nothing_is_lost():
    found = drift(Overflows(), mantissa_rounding, x=torch.randn(5, 8) * 4)
    assert found.first is None and all(point.error_u < 16 for point in found.points)


class Cancels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        far = x + 1000.0
        return torch.tanh((far - 1000.0) * 1.0)


def test_a_jump_out_of_calm_inputs_is_named_though_everything_is_finite():
    found = drift(Cancels(), x=torch.rand(5, 8))
    errors = {point.op: point.error_u for point in found.points}
    assert found.first is not None and found.first.op == "sub" and not found.first.lost
    assert errors["add"] <= 1.0 and errors["sub"] > 64


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def large(x: Tensor) -> Tensor:
            return (x * 300.0) * (x * 300.0) * 1e-6

        return torch.cond(x.sum() > -1e9, large, lambda x: x * 1.0, (x,))


@pytest.mark.slow
def test_nodes_within_a_branch_are_on_the_curve_and_can_be_the_first():
    found = drift(Branches(), x=torch.rand(5, 8) + 2)
    assert found.first is not None and found.first.node.startswith("true_graph_0.") and found.first.lost


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(x < 0, -3.4e38), -1)


def test_a_mask_that_becomes_infinite_in_half_is_not_lost():
    x = torch.randn(5, 8)
    x[:, 0] = 1.0
    found = drift(Masked(), x=x)
    assert found.first is None and not any(point.lost for point in found.points)
    x[3] = -1.0  # a row of nothing but masks: the whole spreads evenly over it, half divides 0 by 0
    found = drift(Masked(), x=x)
    assert found.first is not None and found.first.lost and found.first.op == "softmax"


def test_large_results_are_compared_at_the_same_few_places_every_time(monkeypatch):
    monkeypatch.setattr(curve, "MAX_HELD", 64)
    x = torch.randn(3, 5000)
    once, again = drift(nn.Tanh(), input=x), drift(nn.Tanh(), input=x)
    assert once == again and 0 < once.points[0].error_u <= 1


def test_what_does_not_fit_in_memory_has_no_point(monkeypatch):
    monkeypatch.setattr(curve, "HELD_BYTES", 200)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert len(drift(net, input=torch.randn(5, 8)).points) == 1


def test_a_long_curve_is_thinned_to_the_worst_of_each_stretch(monkeypatch):
    monkeypatch.setattr(curve, "MAX_POINTS", 3)
    found = drift(Overflows(), x=torch.randn(5, 8) * 4)
    reply = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert len(reply["points"]) == 3 and reply["nodes"] == len(found.points) > 3
    assert found.first and reply["first"]["node"] == found.first.node
    assert reply["points"][-1]["lost"] and reply["points"][-1]["error_u"] is None


@pytest.mark.parametrize("rows", [1, 4])
def test_an_empty_curve_is_json_too(rows):
    found = drift(nn.Identity(), input=torch.randn(rows, 2))
    assert found.first is None and found.to_json()["first"] is None
