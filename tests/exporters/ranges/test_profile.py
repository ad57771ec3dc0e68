"""The measurements of a profile, the guards that it finds, and the nodes that it makes suspicious."""

import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.ranges.profile import Profile, profile
from halfeven.exporters.ranges.ranges import Limits, suspicion
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.corpus import CORPUS, captured, fresh
from tests.corpus.case import net
from tests.programs import original


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def profiled(
    forward: Callable[..., object], *batches: Tensor, half: str = "fp16", **parts: Tensor
) -> Profile:
    """The profile of a function of x over batches."""
    made = original(net(forward, **parts), {"x": torch.cat(batches)}, max_batch_size=64)
    return profile(runnable(made.program), [[batch] for batch in batches], half)


def assorted(*shape: int) -> Tensor:
    """Numbers from 1e-9 to 1e6 of both signs, zeros, infinities, NaN and mask values."""
    x = torch.randn(*shape) * 10.0 ** (torch.rand(*shape) * 15.0 - 9.0)
    for value in (0.0, math.inf, -math.inf, math.nan, -1e9, -3.4e38, 2e9, 65504.0, 2.0**-14, 2.0**-24):
        x[torch.rand(*shape) < 0.02] = value
    return x


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_every_statistic_is_what_a_count_over_all_samples_says(half: str) -> None:
    batches = [assorted(3, 50, 2000), assorted(4, 50, 2000)]  # several chunks each
    held = profiled(lambda self, x: x + 0.0, *batches, half=half).nodes["add"].range
    x = torch.cat(batches).flatten()
    finite = x[x.isfinite()]
    sentinels, numbers = finite[finite.abs() >= 1e9], finite[finite.abs() < 1e9]
    size, limits = numbers.abs()[numbers != 0], Limits.of(half)
    assert held.count == len(x) and held.non_finite == len(x) - len(finite)
    assert held.sentinels == len(sentinels) and held.zeros == int((numbers == 0).sum())
    assert (held.sentinel_lowest, held.sentinel_highest) == (float(sentinels.min()), float(sentinels.max()))
    assert (held.lowest, held.highest) == (float(numbers.min()), float(numbers.max()))
    assert (held.largest, held.smallest) == (float(size.max()), float(size.min()))
    counts = (held.under_smallest, held.under_normal, held.over)
    ends = (size < limits.smallest, size < limits.normal, size > limits.largest)
    assert counts == tuple(int(end.sum()) for end in ends)
    assert held.share(held.under_smallest) == pytest.approx(float(ends[0].float().mean()), rel=1e-5)


def test_the_limits_are_those_of_the_half() -> None:
    assert Limits.of("fp16") == Limits(65504.0, 2.0**-14, 2.0**-24)
    assert Limits.of("bf16") == Limits(torch.finfo(torch.bfloat16).max, 2.0**-126, 2.0**-133)


def test_integers_and_bools_are_no_magnitudes_and_weights_are_measured() -> None:
    made = original(
        net(
            lambda self, ids: self.embed(ids * 1000 // 1000) * (ids > 3).unsqueeze(-1),
            embed=nn.Embedding(99999, 4),
        ),
        {"ids": torch.randint(0, 99999, (8, 3))},
    )
    held = profile(runnable(made.program), [[torch.full((2, 3), 99998)]])
    assert not {"ids", "mul", "gt"} & set(held.nodes) and {"embed_weight", "embedding"} <= set(held.nodes)
    assert held.nodes["embed_weight"].range.count == 99999 * 4
    assert max(node.range.largest for node in held.nodes.values()) < 10.0


def test_a_view_has_its_source_s_numbers_and_a_part_has_its_own() -> None:
    x = torch.cat([torch.full((4, 1), 7e4), torch.ones(4, 5)], 1)
    nodes = profiled(lambda self, x: (x.exp().log().t().unsqueeze(0) * 2.0, x[:, 1:] + 0.0), x * 1e-4).nodes
    assert nodes["transpose" if "transpose" in nodes else "t"].range == nodes["log"].range
    assert nodes["unsqueeze"].range == nodes["log"].range
    assert nodes["log"].range.largest == pytest.approx(7.0) and nodes["add"].range.largest < 1e-3


@pytest.mark.slow
def test_nodes_in_control_flow_bodies_are_measured_under_their_qualified_names() -> None:
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 1e5, lambda x: torch.sqrt(x.abs() + 1e-9), (x,))

    held = profiled(forward, torch.ones(2, 3))
    assert held.nodes["true_graph_0.mul"].range.largest == 1e5
    assert "false_graph_0.sqrt" not in held.nodes, "this branch did not run"
    assert [guard.node for guard in held.guards] == ["false_graph_0.add"], "but its guard can be read"
    assert next(entry.node for entry in suspicion(held)) == "true_graph_0.mul"


def test_the_longest_sum_behind_one_element_is_known() -> None:
    made = original(
        net(
            lambda self, x: (x.mean((1, 2)), self.linear(x), self.conv(x), x @ x.transpose(1, 2)),
            linear=nn.Linear(30, 4),
            conv=nn.Conv1d(20, 8, 5),
        ),
        {"x": torch.randn(4, 20, 30)},
    )
    nodes = profile(runnable(made.program), [[torch.randn(2, 20, 30)]]).nodes
    assert [nodes[name].reduces for name in ("mean", "linear", "conv1d", "matmul")] == [600, 30, 100, 30]


def test_scores_inside_a_fused_attention_are_bounded() -> None:
    x = torch.randn(4, 5, 16) * 30.0
    held = profiled(lambda self, x: F.scaled_dot_product_attention(x, x, x), x)
    true = float((x @ x.transpose(1, 2)).abs().max() / 4.0)
    assert true * 0.999 < held.nodes["scaled_dot_product_attention"].scores < true * 1.5


def test_a_profile_can_be_written_as_json() -> None:
    held = profiled(lambda self, x: x / (x + 1e-9), assorted(8, 9))
    text = json.loads(json.dumps(held.to_json(), allow_nan=False))
    assert text["half"] == "float16" and text["guards"][0]["vanishes"] is True
    assert (
        text["nodes"][0]["range"]["largest"]
        == held.nodes["x" if "x" in held.nodes else "tensors_0"].range.largest
    )


# Guards.

GUARDED: dict[str, tuple[Callable[..., Tensor], float]] = {
    "added before sqrt": (lambda self, x: x / torch.sqrt(x.var(-1, keepdim=True) + 1e-12), 1e-12),
    "constant first": (lambda self, x: torch.rsqrt(1e-9 + x.square()), 1e-9),
    "added to a divisor": (lambda self, x: x / (x.norm(dim=-1, keepdim=True) + 1e-8), 1e-8),
    "subtracted": (lambda self, x: torch.log(x.abs() - (-1e-10)), 1e-10),
    "clamp": (lambda self, x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-8), 1e-8),
    "normalize": (lambda self, x: F.normalize(x, dim=-1), 1e-12),
    "maximum with a constant": (lambda self, x: torch.maximum(x.abs(), torch.tensor(1e-9)).log(), 1e-9),
    "max with a buffer": (lambda self, x: torch.max(x.abs(), self.least).reciprocal(), 1e-11),
    "negative power": (lambda self, x: (x.square() + 1e-12) ** -0.5, 1e-12),
    "expanded": (lambda self, x: x / (x.sum(-1, keepdim=True) + 1e-7).expand_as(x), 1e-7),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_guard_is_found_with_its_constant_and_what_relies_on_it(name: str) -> None:
    forward, constant = GUARDED[name]
    guards = profiled(forward, torch.rand(4, 6), least=torch.tensor(1e-11)).guards
    assert len(guards) == 1 and guards[0].constant == pytest.approx(constant, rel=1e-6)
    assert guards[0].vanishes is (constant < 2.0**-25) and guards[0].readers
    assert guards[0].in_half == float(torch.tensor(constant).half())


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x + 1e-12,
        lambda self, x: (x + 1e-12) / 2.0,
        lambda self, x: x / (x + 1.0),
        lambda self, x: (x + 1e-12) ** 2,
        lambda self, x: x.clamp(max=1e-8).sqrt(),
    ],
)
def test_what_guards_nothing_is_no_guard(forward: Callable[..., Tensor]) -> None:
    assert profiled(forward, torch.rand(4, 6)).guards == ()


def test_in_bfloat16_a_guard_of_1e_12_is_still_there() -> None:
    held = profiled(lambda self, x: x / (x.abs() + 1e-12), torch.rand(4, 6), half="bf16")
    assert not held.guards[0].vanishes
    assert not [entry for entry in suspicion(held) if "vanishes" in entry.reason]


# Suspicion.

# trap → a word of the reason, and the op that must be among the first three
TRAPS = {
    "rms norm of large": ("overflow", "mul"),
    "variance of large": ("overflow", "var"),
    "unscaled scores": ("overflow", "matmul"),
    "huge weights": ("overflow", "mul"),
    "tiny product": ("underflow", "mul"),
    "eps 1e-8 on a mean": ("guard 1e-08 in add vanishes in half", "add"),
    "eps 1e-12 on a variance": ("guard 1e-12", "sqrt"),
    "clamp at 1e-8": ("guard 1e-08 in clamp", "div"),
    "maximum with 1e-10": ("guard 1e-10", "maximum"),
    "sinusoidal positions": ("half's step there is 2", "sin"),
    "rotary by a product": ("half's step there is 2", "cos"),
    "least float filled": ("a mask?", "masked_fill"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_the_first_suspects_are_where_the_trap_is(name: str) -> None:
    word, op = TRAPS[name]
    batches = [list(fresh(name, 16, seed).values()) for seed in (1, 2)]
    held = profile(runnable(captured(name).program), batches)
    found = suspicion(held)
    assert [entry.score for entry in found] == sorted((entry.score for entry in found), reverse=True)
    first = [entry for entry in found[:3] if held.nodes[entry.node].op == op]
    assert first and word in first[0].reason, found[:5]


@pytest.mark.parametrize(
    "name", ["adapter", "tied", "stacked", "sinusoidal table", "fused attention, bool mask"]
)
def test_a_healthy_net_is_hardly_suspicious(name: str) -> None:
    held = profile(runnable(captured(name).program), [list(fresh(name, 16, 1).values())])
    assert max((entry.score for entry in suspicion(held)), default=0.0) < 25.0


@pytest.mark.slow
def test_a_guard_that_nothing_small_reaches_is_less_suspicious_than_one_that_is_needed() -> None:
    def score(name: str) -> float:
        held = profile(runnable(captured(name).program), [list(fresh(name, 32, 1).values())])
        return max(entry.score for entry in suspicion(held) if entry.reason.startswith("guard"))

    assert score("harmless guard") < 50.0 < score("eps 1e-8 on a mean")


def test_inputs_and_weights_are_no_suspects_but_the_ops_that_read_them_are() -> None:
    held = profiled(lambda self, x: x * self.weight, torch.ones(4, 6), weight=torch.full((6,), 1e-9))
    assert [(entry.node, "weight" in entry.reason or "mul" in entry.reason) for entry in suspicion(held)] == [
        ("mul", True)
    ]


def test_a_difference_of_nearly_equal_tensors_is_named_with_the_bits_it_loses() -> None:
    x = torch.rand(4, 6) + 100.0
    found = suspicion(profiled(lambda self, x: x * 2.0 - (x * 2.0 + torch.tanh(x)), x))
    assert found[0].node == "sub" and "8 bits are lost" in found[0].reason and found[0].score > 40.0


def test_a_term_that_is_lost_beside_the_other_is_named() -> None:
    held = profiled(lambda self, x: x + x * 1e-4 / 30.0, torch.full((4, 6), 30.0))
    assert any("absorption" in entry.reason for entry in suspicion(held))


@pytest.mark.slow
def test_every_trap_of_range_in_the_corpus_is_suspected() -> None:
    """The search begins with the suspected nodes: no trap whose numbers leave half's range goes unmentioned."""
    silent = []
    for name, case in CORPUS.items():
        if any(word in case.trap for word in ("overflow", "subnormal", "vanish", "1e-12", "squares 500")):
            held = profile(runnable(captured(name).program), [list(fresh(name, 32, 4).values())])
            if not any(entry.score > 5.0 for entry in suspicion(held)):
                silent.append(name)
    assert silent == []
