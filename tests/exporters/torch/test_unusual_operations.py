"""Operations that take one dtype alone, and those whose sizes or parts the values decide: every plan of theirs runs."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.torch.autocast.kernels import HalfKernels
from halfeven.exporters.torch.program_graph import ProgramGraph, program_graph
from torch import Tensor, nn

from tests.conversions import as_subject
from tests.programs import original
from tests.slow import drawn

Forward = Callable[[Tensor, Tensor, Tensor], Any]


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 16)


def places(x: Tensor) -> Tensor:
    return torch.arange(16).expand(x.shape[0], 16)


def rows_written(h: Tensor, m: Tensor, x: Tensor) -> Tensor:
    made = zeros(x)
    made[:, torch.tensor([1, 3])] = m[:, :2]
    return made + h


INTO_ANOTHER: dict[str, Forward] = {  # what an operation writes into stays in FP32, what it writes is half
    "index_put_": rows_written,
    "index_put_ that adds": lambda h, m, x: (
        zeros(x).index_put_((torch.arange(x.shape[0]), places(x)[:, 0]), m[:, 0], accumulate=True) + h
    ),
    "scatter_": lambda h, m, x: zeros(x).scatter_(1, places(x), m) + h,
    "scatter_add_": lambda h, m, x: zeros(x).scatter_add_(1, places(x), m) + h,
    "scatter_reduce_": lambda h, m, x: x.clone().scatter_reduce_(1, places(x), h, "amax") * m,
    "index_copy_": lambda h, m, x: zeros(x).index_copy_(1, torch.arange(16).flip(0), m) + h,
    "index_add_": lambda h, m, x: zeros(x).index_add_(1, torch.arange(16) % 4, m) + h,
    "masked_scatter_": lambda h, m, x: x.clone().masked_scatter_(x > 0, m) + h,
    "baddbmm_": lambda h, m, x: torch.zeros(x.shape[0], 4, 4).baddbmm_(
        h.reshape(-1, 4, 4), m.reshape(-1, 4, 4)
    ),
    "addmm_": lambda h, m, x: h @ torch.zeros(16, 16).addmm_(h.mT, m),
    "lerp_": lambda h, m, x: x.clone().lerp_(h, 0.3) * m,
    "into half": lambda h, m, x: h.clone().scatter_(1, places(x), x) + m,
}
OF_ONE: dict[str, Forward] = {
    "solve": lambda h, m, x: torch.linalg.solve(h.reshape(-1, 4, 4) + 3 * torch.eye(4), x.reshape(-1, 4, 4)),
    "scatter": lambda h, m, x: zeros(x).scatter(1, places(x), m) + h,
    "index_add": lambda h, m, x: x.index_add(1, torch.arange(16) % 4, h) + m,
    "lerp": lambda h, m, x: torch.lerp(h, x, torch.sigmoid(m)),
}
DECIDED_BY_VALUES: dict[str, Forward] = {
    "rows": lambda h, m, x: h[h.sum(-1) > 0].sum(0, keepdim=True) + x,
    "where of one": lambda h, m, x: h[torch.where(h > 0.3)].sum() + m,
    "assigned": lambda h, m, x: h.clone().index_put_(torch.where(h > 0.3), torch.zeros(())) + m,
    "quantile": lambda h, m, x: torch.quantile(h, 0.3, dim=-1, keepdim=True) + m,
    "padded with zeros": lambda h, m, x: torch.constant_pad_nd(h, (1, 1)) * 2,
}
ALL = INTO_ANOTHER | OF_ONE | DECIDED_BY_VALUES


class Net(nn.Module):
    def __init__(self, then: Forward) -> None:
        super().__init__()
        self.one, self.two, self.then = nn.Linear(16, 16), nn.Linear(16, 16), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.one(x), self.two(x), x)


def graph_of(name: str, level: str) -> ProgramGraph:
    x = torch.randn(16, 16)
    model = original(Net(ALL[name]), {"x": x})
    samples = Samples({"x": x.numpy()})
    return program_graph(as_subject(model, samples, level), samples, model.example)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), drawn(2, [*product(ALL, ["O1", "O2", "O3"])]))
def test_every_plan_runs_whatever_it_keeps(name: str, level: str) -> None:
    graph = graph_of(name, level)
    asked = {"x": np.random.default_rng().standard_normal((8, 16), np.float32)}
    expected = graph.original()(asked)["y0"]
    for kept in ((), *((one.node,) for one in graph.candidates())):
        answer = graph.half(kept)(asked)["y0"]
        if name not in DECIDED_BY_VALUES:
            np.testing.assert_allclose(answer, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("name", INTO_ANOTHER)
def test_where_half_is_written_into_fp32_what_is_written_is_read_in_fp32(name: str) -> None:
    """Live autocast raises there."""
    graph = graph_of(name, "O1")
    (at,) = (one for one, action in graph.plan.actions.items() if action.value == "as its first input")
    read = set(graph.typing.under(graph.plan).reads[at].values()) - {torch.int64, torch.bool}
    assert read == {torch.float16 if name == "into half" else torch.float32}


def test_each_kind_of_call_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, raised = list[str](), HalfKernels.raised

    def counted(self: HalfKernels, call: Any, instead: torch.dtype | None) -> str:
        tried.append(call.op_name)
        return raised(self, call, instead)

    monkeypatch.setattr(HalfKernels, "raised", counted)
    graph_of("scatter_", "O1")
    tried.clear()
    graph_of("scatter_", "O1")
    assert not tried
