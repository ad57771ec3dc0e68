"""Mask sentinels: rewritten where FP32 answers stay bit-equal, fully masked rows included, else named."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.ranges.masks import HIGH, LOW
from halfeven.exporters.ranges.profile import Profile, profile
from halfeven.exporters.ranges.sentinels import Rewritten, rewrite_sentinels
from halfeven.models.program import runnable
from torch import Tensor
from torch.fx import GraphModule

from tests.corpus.case import net
from tests.programs import Original, original

LEAST = torch.finfo(torch.float32).min
LENGTH, WIDTH = 6, 8


def scores(x: Tensor) -> Tensor:
    return x @ x.transpose(1, 2) / WIDTH**0.5


def rows(count: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Masks of 0 and 1 as INT64: the first row masks all, the second nothing, the rest something."""
    mask = (torch.rand(count, LENGTH) < 0.6).long()
    mask[0], mask[1] = 0, 1
    return {"x": torch.randn(count, LENGTH, WIDTH) * scale, "mask": mask}


def triangle(value: float = LEAST) -> Tensor:
    return torch.full((LENGTH, LENGTH), value).triu(1)


def fill(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores(x).masked_fill(mask[:, None] == 0, LEAST), -1) @ x


def fill_in_place(self, x: Tensor, mask: Tensor) -> Tensor:
    found = scores(x).clone()
    found.masked_fill_(mask[:, None] == 0, -1e9)
    return torch.softmax(found, -1) @ x


def put(self, x: Tensor, mask: Tensor) -> Tensor:
    found = scores(x).clone()
    found[(mask[:, None] == 0).expand(-1, LENGTH, -1)] = -1e9
    return torch.softmax(found, -1) @ x


def choose(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask[:, None] == 0, -1e9, scores(x)), -1) @ x


def choose_tensor(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask[:, None] == 1, scores(x), torch.tensor(LEAST)), -1) @ x


def choose_buffer(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask[:, None] == 1, scores(x), self.least), -1) @ x


def add(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores(x) + (1.0 - mask[:, None].float()) * LEAST, -1) @ x


def add_of_integers(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((1 - mask[:, None]) * -1e9 + scores(x), -1) @ x


def add_with_a_positive_factor(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores(x) + (mask[:, None].float() - 1.0) * 1e9, -1) @ x


def add_filled(self, x: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)
    found = scores(x).unsqueeze(1) + bias[:, None, None].expand(-1, 1, LENGTH, LENGTH)
    return torch.softmax(found.flatten(0, 1), -1) @ x


def add_twice_with_scores(self, x: Tensor, mask: Tensor) -> Tensor:
    """A mask, then a bias of positions: the sentinel absorbs both."""
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)
    return torch.softmax(scores(x) + bias[:, None] + self.positions, -1) @ x


def causal(self, x: Tensor, mask: Tensor) -> Tensor:
    made = torch.triu(torch.full((LENGTH, LENGTH), LEAST), 1)
    return torch.softmax(scores(x) + made, -1) @ x * mask.unsqueeze(-1)


def causal_buffer(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores(x) + self.causal[None], -1) @ x * mask.unsqueeze(-1)


def combined(self, x: Tensor, mask: Tensor) -> Tensor:
    """Two masks by the smaller of the two: a sentinel twice is still one sentinel."""
    padding = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)
    return torch.softmax(scores(x) + torch.minimum(self.causal, padding[:, None]), -1) @ x


def floored(self, x: Tensor, mask: Tensor) -> Tensor:
    """OPT: two masks are added, and the sum is lifted to the least number."""
    padding = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)
    found = torch.max(scores(x) + (self.causal + padding[:, None]), torch.tensor(LEAST))
    return torch.softmax(found, -1) @ x


def unmasked_again(self, x: Tensor, mask: Tensor) -> Tensor:
    """transformers' ``_unmask_unattended``: a row that is masked altogether attends to everything."""
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)[:, None]
    bias = bias * ~torch.all(bias == LEAST, dim=-1, keepdim=True)
    return torch.softmax(scores(x) + bias, -1) @ x


def fused(self, x: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)[:, None]
    return F.scaled_dot_product_attention(x, x, x.flip(-1), attn_mask=bias.expand(-1, LENGTH, -1))


def branch(self, x: Tensor, mask: Tensor) -> Tensor:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(scores(x).masked_fill(mask[:, None] == 0, LEAST), -1) @ x

    return torch.cond(x.sum() > 1e6, lambda x, mask: x * 2.0, masked, (x, mask))


def pooled(self, x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask[:, :, None] == 0, -1e9).amax(1).clamp(min=-1.0)


REWRITTEN: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        fill,
        fill_in_place,
        put,
        choose,
        choose_tensor,
        choose_buffer,
        add,
        add_of_integers,
        add_with_a_positive_factor,
        add_filled,
        add_twice_with_scores,
        causal,
        causal_buffer,
        combined,
        floored,
        unmasked_again,
        fused,
        branch,
        pooled,
    )
}


def captured(forward: Callable[..., Tensor | tuple[Tensor, ...]], scale: float = 1.0) -> Original:
    parts = {"least": torch.tensor(LEAST), "causal": triangle(), "positions": torch.randn(LENGTH, LENGTH)}
    return original(net(forward, **parts), rows(8, scale))


def rewritten(
    made: Original, half: str = "fp16", scale: float = 1.0
) -> tuple[GraphModule, Rewritten, Profile]:
    module = runnable(made.program)
    held = profile(module, [list(rows(8, scale).values()) for _ in range(2)], half)
    return module, rewrite_sentinels(module, held), held


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@pytest.mark.slow
@pytest.mark.parametrize("name", REWRITTEN)
def test_a_mask_is_rewritten_and_every_fp32_answer_stays_bit_equal(name: str) -> None:
    made = captured(REWRITTEN[name])
    before = [node.name for node in runnable(made.program).graph.nodes]
    module, result, _ = rewritten(made)
    assert len(result.repairs) == 1 and result.keep == (), result
    assert [name for name in before if name not in {node.name for node in module.graph.nodes}] == []
    for count in (2, 5, 16):
        inputs = list(rows(count).values())
        expected = made.run(*[tensor.clone() for tensor in inputs])[0]
        with torch.inference_mode():
            assert torch.equal(module(*inputs)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(REWRITTEN) - {"branch"}))
def test_no_tensor_of_the_rewritten_program_holds_a_number_that_half_has_not(name: str) -> None:
    module, _, _ = rewritten(captured(REWRITTEN[name]))
    held = profile(module, [list(rows(8).values())])
    over = {node.node for node in held.nodes.values() if node.range.over or node.range.sentinels}
    # two masks added are −∞ in half, and are lifted like one; a buffer is still there for others
    assert over <= ({"add", "add_1"} if name == "floored" else set())


def test_a_tensor_that_is_masked_in_place_is_masked_under_its_first_name_too() -> None:
    made = captured(fill_in_place)
    module = runnable(made.program)
    (written,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.masked_fill_.Scalar)
    written.replace_all_uses_with(written.args[0])
    result = rewrite_sentinels(module, profile(module, [list(rows(8).values())]))
    assert len(result.repairs) == 1 and result.keep == ()
    inputs = list(rows(5).values())
    expected = made.run(*[tensor.clone() for tensor in inputs])[0]
    with torch.inference_mode():
        assert torch.equal(module(*inputs)[0], expected)


def test_scores_in_half_are_masked_without_an_error_and_an_empty_row_is_uniform() -> None:
    made = captured(fill)
    x, mask = (tensor for tensor in rows(8).values())
    with pytest.raises(RuntimeError, match="overflow"):
        runnable(made.program).half()(x.half(), mask)
    module, _, _ = rewritten(made)
    with torch.inference_mode():
        answer = module.half()(x.half(), mask)[0].float()
    torch.testing.assert_close(answer, made.run(x, mask)[0], atol=4e-3, rtol=0)
    torch.testing.assert_close(answer[0], x[0].mean(0).expand(LENGTH, -1), atol=2e-3, rtol=0)


def test_a_mask_made_in_half_and_added_in_half_leaves_an_empty_row_uniform() -> None:
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(scores(x) + (1.0 - mask[:, None].to(x.dtype)) * LEAST, -1) @ x

    made = captured(forward)
    module, result, _ = rewritten(made)
    assert "a floor" in result.repairs[0].what
    for node in module.graph.nodes:  # as the rewrite to half does with a dtype asked for by name
        if node.target is torch.ops.aten.to.dtype:
            node.update_arg(1, torch.float16)
    module.recompile()
    x, mask = (tensor for tensor in rows(8).values())
    with torch.inference_mode():
        answer = module(x.half(), mask)[0].float()
    torch.testing.assert_close(answer, made.run(x, mask)[0], atol=4e-3, rtol=0)


@pytest.mark.slow
def test_inserted_nodes_know_where_they_come_from() -> None:
    for forward in (add, fused):
        made = captured(forward)
        old = {node.name for node in runnable(made.program).graph.nodes}
        module, _, _ = rewritten(made)
        new = [node for node in module.graph.nodes if node.name not in old]
        assert new and all("stack_trace" in node.meta and "nn_module_stack" in node.meta for node in new)


# Masks that cannot be proven.


def two_masks_added(self, x: Tensor, mask: Tensor) -> Tensor:
    """−3.4e38 twice is −∞: a row may have masked elements of two kinds, and only one of them counts."""
    padding = torch.zeros(mask.shape).masked_fill(mask == 0, LEAST)
    return torch.softmax(scores(x) + self.causal + padding[:, None], -1) @ x


def two_sentinels(self, x: Tensor, mask: Tensor) -> Tensor:
    found = scores(x).masked_fill(mask[:, None] == 0, -1e9)
    return torch.softmax(torch.where(self.causal < 0, LEAST, found), -1) @ x


def beside_infinity(self, x: Tensor, mask: Tensor) -> Tensor:
    found = scores(x).masked_fill(mask[:, None] == 0, -1e9)
    return torch.softmax(found.masked_fill(self.causal < 0, float("-inf")), -1) @ x


def given_back(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    found = scores(x).masked_fill(mask[:, None] == 0, -1e9)
    return found, torch.softmax(found, -1)


def log_softmax(self, x: Tensor, mask: Tensor) -> Tensor:
    return torch.log_softmax(scores(x).masked_fill(mask[:, None] == 0, -1e9), -1)


def through_a_view(self, x: Tensor, mask: Tensor) -> Tensor:
    found = scores(x).clone()
    found[:, 1:].masked_fill_(mask[:, None] == 0, -1e9)
    return torch.softmax(found, -1) @ x


def scaled_mask(self, x: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(mask.shape).masked_fill(mask == 0, -1e9)
    return torch.softmax(scores(x) + bias[:, None] * self.positions.abs(), -1) @ x


REFUSED: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], str]] = {
    "two masks added": (two_masks_added, "two masks are added"),
    "two sentinels": (two_sentinels, "mixes mask values"),
    "beside infinity": (beside_infinity, "−inf"),
    "log softmax": (log_softmax, "reaches log_softmax"),
    "through a view": (through_a_view, "other names"),
    "scaled mask": (scaled_mask, "multiplies a mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proven_is_not_touched_and_its_ops_are_named(name: str) -> None:
    forward, reason = REFUSED[name]
    module, result, _ = rewritten(captured(forward))
    # a mask that is only compared with a small number is another one
    assert {repair.node for repair in result.repairs} <= {"causal"}
    assert result.keep and all(reason in kept.reason for kept in result.keep), result.keep
    names = {node.name for node in module.graph.nodes}
    assert {kept.node for kept in result.keep} <= names


@pytest.mark.slow
def test_a_mask_that_is_an_answer_is_a_sentinel_there_and_one_with_scores_added_is_not_touched() -> None:
    def summed(self, x: Tensor, mask: Tensor) -> Tensor:
        return scores(x) + torch.zeros(mask.shape).masked_fill(mask == 0, -1e9)[:, None]

    module, result, _ = rewritten(made := captured(given_back))
    assert len(result.repairs) == 1 and result.keep == ()
    inputs = list(rows(5).values())
    came, expected = module(*inputs)[0], made.run(*inputs)[0]
    torch.testing.assert_close(came, expected.clamp_min(LOW), rtol=0, atol=0)
    _, result, _ = rewritten(captured(summed))
    assert result.repairs == () and all("output" in kept.reason for kept in result.keep)


def test_a_row_that_two_added_masks_empty_would_come_out_different_if_they_were_rewritten() -> None:
    """The trap behind the refusal: in FP32 the elements that one mask hides win over those that both hide."""
    one = torch.tensor([[0.0, LEAST, LEAST]])
    other = torch.tensor([[LEAST, LEAST, 0.0]])
    whole_row = torch.softmax(one + other, -1)
    low = (one.clamp_min(LOW) + other.clamp_min(LOW)).clamp_min(HIGH)
    assert not torch.allclose(whole_row, torch.softmax(low, -1))


def test_a_sentinel_that_does_not_absorb_the_scores_is_left_alone() -> None:
    """−1e9 + 40 is not −1e9 in FP32: an empty row is not uniform there either."""
    made = captured(add_of_integers, 4.0)
    _, result, _ = rewritten(made, scale=4.0)
    assert result.repairs == () and "does not absorb" in result.keep[0].reason


def test_scores_too_large_for_any_half_mask_are_left_alone() -> None:
    _, result, _ = rewritten(captured(fill, 40.0), scale=40.0)
    assert result.repairs == () and "expected at most" in result.keep[0].reason


def test_an_input_that_holds_the_sentinel_itself_is_named() -> None:
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(scores(x) + bias[:, None], -1) @ x

    bias = torch.zeros(8, LENGTH).masked_fill(rows(8)["mask"] == 0, LEAST)
    inputs = {"x": rows(8)["x"], "bias": bias}
    module = runnable(original(net(forward), inputs).program)
    result = rewrite_sentinels(module, profile(module, [list(inputs.values())]))
    assert result.repairs == () and all("the input" in kept.reason for kept in result.keep)
    assert {kept.op for kept in result.keep} >= {"add", "softmax"}


def test_a_mask_of_fractions_is_not_taken_for_one_of_zeros_and_ones() -> None:
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(scores(x) + (1.0 - mask[:, None] * 0.5) * -1e9, -1) @ x

    module, result, _ = rewritten(captured(forward))
    assert result.repairs == () and -1e9 in [arg for node in module.graph.nodes for arg in node.args]


@pytest.mark.slow
def test_bfloat16_has_minus_1e9_but_not_the_least_float() -> None:
    assert rewritten(captured(choose), "bf16")[1] == Rewritten((), ())
    made = captured(fill)
    module, result, _ = rewritten(made, "bf16")
    inputs = list(rows(8).values())
    assert len(result.repairs) == 1
    with torch.inference_mode():
        assert torch.equal(module(*inputs)[0], made.run(*inputs)[0])


def test_minus_infinity_is_left_alone_for_half_has_it() -> None:
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = torch.softmax(scores(x).masked_fill(mask[:, None] == 0, float("-inf")), -1)
        return torch.nan_to_num(weights) @ x

    assert rewritten(captured(forward))[1] == Rewritten((), ())
