"""Power-of-two repairs: bit-equal in FP32, finite in half, proposed only where they can help."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.ranges.profile import profile
from halfeven.exporters.ranges.repairs import Repair, apply, candidates
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.corpus.case import net
from tests.programs import Original, original

WIDTH = 16


def attention(self, x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(1, 2) / 3e5, -1) @ x


def scaled_attention(self, x: Tensor) -> Tensor:
    return torch.softmax(torch.bmm(x, x.transpose(1, 2)) * 2.0**-18, -1)


def normalised(self, x: Tensor) -> Tensor:
    return F.layer_norm(self.grow(x), (WIDTH,), self.weight)


def normalised_without_weights(self, x: Tensor) -> Tensor:
    return F.layer_norm(self.grow(x), (WIDTH,))


def grouped(self, x: Tensor) -> Tensor:
    return F.group_norm(self.conv(x.unsqueeze(1)), 2, eps=1e-3)


def averaged(self, x: Tensor) -> Tensor:
    return (x.abs() * 16.0).sum(1) / x.shape[1]


def counted(self, x: Tensor) -> Tensor:
    return (x.abs() * 16.0).sum(1) / (x > 0).sum(1).clamp(min=1)


def length(self, x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True))


def inverse_length(self, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0)


# forward, the kind of its repair, the op that overflows
REPAIRED: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "attention": (attention, "product", "matmul"),
    "scaled attention": (scaled_attention, "product", "bmm"),
    "layer norm": (normalised, "norm", "linear"),
    "layer norm without weights": (normalised_without_weights, "norm", "linear"),
    "group norm": (grouped, "norm", "conv2d"),
    "average": (averaged, "mean", "sum_1"),
    "count": (counted, "mean", "sum_1"),
    "length": (length, "square", "mul"),
    "inverse length": (inverse_length, "square", "pow_1"),
}


def rows(count: int, scale: float = 500.0) -> dict[str, Tensor]:
    """Numbers around 500, and one row of smaller ones."""
    x = torch.randn(count, 20, WIDTH) * scale
    x[0] *= 1e-2
    return {"x": x}


def captured(forward: Callable[..., Tensor], scale: float = 500.0) -> Original:
    conv = nn.Conv2d(1, 4, 3)
    nn.init.normal_(conv.weight, std=100.0)
    grow = nn.Linear(WIDTH, WIDTH)
    nn.init.normal_(grow.weight, std=100.0)
    return original(net(forward, grow=grow, conv=conv, weight=torch.rand(WIDTH)), rows(8, scale))


def proposed(made: Original, scale: float = 500.0) -> tuple[GraphModule, list[Repair]]:
    module = runnable(made.program)
    return module, candidates(module, profile(module, [list(rows(8, scale).values()) for _ in range(2)]))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("name", REPAIRED)
def test_a_repair_keeps_every_fp32_answer_bit_for_bit(name: str) -> None:
    forward, kind, node = REPAIRED[name]
    made = captured(forward)
    module, repairs = proposed(made)
    assert [(repair.kind, repair.node) for repair in repairs] == [(kind, node)]
    before = {node.name for node in module.graph.nodes}
    apply(module, repairs[0])
    assert before < {node.name for node in module.graph.nodes}
    for count in (2, 7):
        inputs = list(rows(count).values())
        with torch.inference_mode():
            assert torch.equal(module(*inputs)[0], made.run(*inputs)[0])


@pytest.mark.parametrize("name", REPAIRED)
def test_after_a_repair_nothing_in_it_overflows_even_for_samples_times_4(name: str) -> None:
    made = captured(REPAIRED[name][0])
    module, repairs = proposed(made)
    for repair in repairs:
        apply(module, repair)
    held = profile(module, [[x * 4.0 for x in rows(8).values()]])
    products = [node for node in held.nodes.values() if node.node == repairs[0].node]
    assert products[0].range.over == 0 < products[0].range.largest
    inner = [held.nodes[name] for name in held.nodes if name.startswith(("mean", "sum", "add"))]
    assert all(node.range.over == 0 for node in inner)


def test_scores_that_overflowed_in_half_are_right_after_the_repair() -> None:
    made = captured(attention)
    inputs = list(rows(4).values())
    broken = runnable(made.program)(*[x.half() for x in inputs])[0]
    module, repairs = proposed(made)
    apply(module, repairs[0])
    expected = made.run(*inputs)[0]
    assert not broken.isfinite().all()
    error = (module(*[x.half() for x in inputs])[0].float() - expected).abs().max()
    assert error < 4e-3 * expected.abs().max()


def guarded(self, x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def read_twice(self, x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2)
    return torch.softmax(scores / 3e5, -1) + torch.tanh(scores)


def large_answer(self, x: Tensor) -> Tensor:
    return (x.abs() * 16.0).sum(1) / 0.5


def rounded(self, x: Tensor) -> Tensor:
    return torch.div((x.abs() * 16.0).sum(1), 20, rounding_mode="floor")


def batch_normalised(self, x: Tensor) -> Tensor:
    return F.batch_norm(self.conv(x.unsqueeze(1)), torch.zeros(4), torch.ones(4), eps=1e-5)


@pytest.mark.parametrize("forward", [guarded, read_twice, large_answer, rounded, batch_normalised])
def test_what_a_scale_would_not_mend_is_not_proposed(forward: Callable[..., Tensor]) -> None:
    """An eps that would vanish, another reader, a large result, an op that takes no scale away."""
    assert proposed(captured(forward))[1] == []


@pytest.mark.slow
def test_what_fits_half_is_not_repaired() -> None:
    for forward, _, _ in REPAIRED.values():
        made = captured(forward, 1.0)
        if forward not in (normalised, normalised_without_weights, grouped):
            assert proposed(made, 1.0)[1] == []


def test_a_repair_for_another_graph_is_refused() -> None:
    _, repairs = proposed(captured(attention))
    other = runnable(captured(averaged).program)
    with pytest.raises(ValueError, match="not the one that was profiled"):
        apply(other, repairs[0])


def test_new_nodes_know_where_they_come_from_and_others_keep_their_names() -> None:
    made = captured(length)
    module, repairs = proposed(made)
    old = [node.name for node in module.graph.nodes]
    apply(module, repairs[0])
    assert [node.name for node in module.graph.nodes if node.name in old] == old
    new = [node for node in module.graph.nodes if node.name not in old]
    assert len(new) == 2 and all("stack_trace" in node.meta for node in new)
