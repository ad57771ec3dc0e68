"""The ledger of rounded weights, and FP32 for what half cannot hold."""

import json
import math

import numpy as np
import pytest
import torch
from halfeven.exporters.graph.actions import Action
from halfeven.exporters.policy.weights import measure
from halfeven.exporters.torch.autocast.ledger import weigh
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.nets import NETS
from tests.programs import original

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.big, self.tiny = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            self.big.weight[0, 0] = 1e5
            self.tiny.weight.mul_(1e-8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.big(self.fine(x)), x @ self.tiny.weight.t() * 1e8


class Cities(nn.Module):
    """A table that few rows leave half's range in, and a product of what is taken out of it."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.table, self.product = nn.Embedding(8, 4), nn.Linear(8, 4)
        with torch.no_grad():
            self.table.weight[7, 0] = largest

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.product(torch.cat([self.table(ids).view(-1, 4), x], 1))


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "kept"), [(1e5, {"linear"}), (6e4, set()), (3.4e38, set())])
def test_whatever_reads_numbers_out_of_a_table_that_leaves_half_s_range_stays_fp32(
    largest: float, kept: set[str]
) -> None:
    """No sample need take such a row. A number as large as a mask's is no number of the table."""
    model = original(Cities(largest), {"ids": torch.tensor([0, 3, 5]), "x": torch.randn(3, 4)})
    module = runnable(model.program)
    _, plan = weigh(module, make_plan(module, Precision()), model.example)
    assert {one.node for one in plan.kept} == kept


@pytest.mark.parametrize("dtype", HALF)
def test_a_weight_that_rounds_well_is_within_half_a_unit_and_in_budget(dtype: str) -> None:
    entry = measure("w", torch.randn(64, 64).numpy(), dtype)
    assert 0.1 < entry.error_u < 1 and 0 < entry.worst <= torch.finfo(HALF[dtype]).eps / 2
    assert entry.underflowed < 1e-3 and entry.saturated == 0 and not entry.over_budget


def test_what_underflows_becomes_subnormal_or_saturates_is_counted() -> None:
    weight = np.array([0.0, 1.0, 1e-9, -1e-9, 1e-6, 3e-5, 65519.0, 65520.0, -1e6, np.inf], np.float32)
    entry = measure("w", weight, "fp16")
    assert (entry.underflowed, entry.subnormal) == (2 / 9, 2 / 9)
    assert entry.saturated == 2 and entry.over_budget and entry.worst == math.inf
    assert json.loads(json.dumps(entry.to_json(), allow_nan=False))["worst"] is None
    assert measure("w", weight, "bf16").saturated == 0


def test_zeros_and_a_few_lost_numbers_are_in_budget_and_only_lost_ones_are_not() -> None:
    weight = torch.randn(1000).numpy()
    weight[::10] = 1e-12
    assert not measure("w", weight, "fp16").over_budget
    assert not measure("w", np.zeros(8), "fp16").over_budget
    assert measure("w", np.full(8, 1e-30), "fp16").over_budget
    assert not measure("w", np.full(8, 1e-30), "bf16").over_budget


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_the_readers_of_a_weight_that_does_not_fit_are_fp32_with_reason_and_evidence(level: str) -> None:
    model = original(Weights(), {"x": torch.randn(8, 4)})
    module = runnable(model.program)
    ledger, plan = weigh(module, make_plan(module, Precision(level)), model.example)
    assert {e.weight: e.over_budget for e in ledger.entries} == {
        "fine.weight": False, "big.weight": True, "tiny.weight (t)": True, "1e+08 (mul)": True,
    }  # fmt: skip
    reasons = {one.op: (one.reason, one.evidence) for one in plan.kept}
    assert reasons["linear"] == (
        "the weight 'big.weight' does not fit in half", "1 of 16 elements would become infinite",
    )  # fmt: skip
    assert "100.00% of it would become zero" in reasons["matmul"][1]
    assert plan.actions["mul"] is Action.FP32  # at O1 as if promoted, at O3 kept
    assert all(plan.actions[one.node] is Action.FP32 for one in plan.kept)
    assert len(plan.kept) == (2 if level == "O1" else 3)
    half = rewrite(model.program, plan, model.spec, model.example, module)
    dtypes = {name: tensor.dtype for name, tensor in half.program.state_dict.items()}
    assert dtypes["fine.weight"] == torch.float16 and dtypes["big.weight"] == torch.float32
    x = torch.randn(3, 4)
    with torch.inference_mode():
        came, exact = runnable(half.program)(x), model.run(x)
    for one, other in zip(came, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def test_weighing_leaves_program_and_plan_as_they_were_where_all_fits() -> None:
    model = original(NETS["tied"].build(), NETS["tied"].inputs(8))
    module = runnable(model.program)
    before = [str(node) for node in module.graph.nodes]
    plan = make_plan(module, Precision())
    ledger, weighed = weigh(module, plan, model.example)
    assert weighed == plan and [str(node) for node in module.graph.nodes] == before
    assert {"linear.weight", "head.bias"} <= {entry.weight for entry in ledger.entries}
