"""The parts of a half model that stay in FP32: norms by torch's types, by the operator's word, and by what they
compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop.half_model import BY_LOOK, NAMED, HalfModel, without_autocast
from halfeven.serve.finetune.training.loop.norm_look import norms_of
from halfeven.serve.finetune.training.loop.training_terms import Stopped
from torch import Tensor, nn
from torch.nn import functional


class Scaled(nn.Module):
    """A module with a weight, whose forward is a function of the input and of that weight."""

    def __init__(self, computed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.computed = nn.Parameter(torch.ones(8)), computed

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(x, self.weight)


class Block(nn.Module):
    """``part`` between two linear layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 8), part, nn.Linear(8, 3)
        self.seen: list[torch.dtype] = []
        self.last.register_forward_pre_hook(lambda _, inputs: self.seen.append(inputs[0].dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)).relu())


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(self.norm(x))


class LinearNormActivation(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


class Stabiliser(nn.LayerNorm):
    """A norm of torch's under another name."""


def attention(x: Tensor, weight: Tensor) -> Tensor:
    shares = (x - x.amax(-1, keepdim=True)).exp()
    return weight * x * (shares / shares.sum(-1, keepdim=True))


BY_HAND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms": lambda x, weight: weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms in place": lambda x, weight: (
        weight * x.clone().div_((x * x).sum(-1, keepdim=True).div_(8).add_(1e-6).sqrt_())
    ),
    "rms by norm": lambda x, weight: weight * x / (x.norm(dim=-1, keepdim=True) * 8**-0.5 + 1e-6),
    "rms by power": lambda x, weight: (
        (x.float() * (x.float() ** 2).mean(-1, True).add(1e-6) ** -0.5).type_as(x) * weight
    ),
    "layer": lambda x, weight: weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "layer by variance": lambda x, weight: (
        weight * (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6)
    ),
    "batch": lambda x, weight: weight * (x - x.mean(0)) * (1 / (x.var(0, unbiased=False) + 1e-5).sqrt()),
    "functional layer": lambda x, weight: functional.layer_norm(x, (8,), weight),
    "functional rms": lambda x, weight: functional.rms_norm(x, (8,), weight),
    "functional group": lambda x, weight: functional.group_norm(x, 2, weight),
    "l2": lambda x, weight: weight * functional.normalize(x, dim=-1),
}
NO_NORM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate": lambda x, weight: weight * x * x.mean(-1, keepdim=True).sigmoid(),
    "attention": attention,
    "scaled": lambda x, weight: weight * x / torch.tensor(8.0).sqrt(),
    "distance": lambda x, weight: x + (x - weight).pow(2).sum(-1, keepdim=True).sqrt(),
}


def half(part: nn.Module, *fp32_modules: str) -> tuple[HalfModel, Block]:
    block = Block(part)
    model = HalfModel(block, torch.float16, fp32_modules)
    model.look(torch.randn(6, 4))
    block.seen.clear()
    answer: Any = model(torch.randn(6, 4))
    answer.float().sum().backward()
    assert answer.dtype == torch.float16 and all(one.grad is not None for one in block.first.parameters())
    return model, block


@pytest.mark.parametrize("name", BY_HAND)
def test_a_norm_that_is_written_by_hand_is_found_by_what_it_computes(name: str) -> None:
    given: list[torch.dtype] = []
    part = Scaled(lambda x, weight: given.extend([x.dtype, weight.dtype]) or BY_HAND[name](x, weight))
    model, block = half(part)
    assert model.in_fp32 == {"part": BY_LOOK} and not model.mixed
    assert given[-2:] == [torch.float32, torch.float32] and block.seen == [torch.float16]


@pytest.mark.parametrize("name", NO_NORM)
def test_what_multiplies_by_a_mean_or_divides_by_a_sum_is_no_norm(name: str) -> None:
    model, _ = half(Scaled(NO_NORM[name]))
    assert not model.in_fp32 and not model.mixed


def test_the_name_of_a_class_does_not_make_it_a_norm() -> None:
    for part, expected in (
        (PreNorm(), "part.norm"),
        (LinearNormActivation(), "part.1"),
        (Stabiliser(8), "part"),
    ):
        model, _ = half(part)
        assert list(model.in_fp32) == [expected] and "a " in model.in_fp32[expected]
    assert not norms_of(Scaled(BY_HAND["rms"]))


def test_a_module_with_products_that_normalises_too_is_named_and_stays_half() -> None:
    matrix = torch.randn(8, 8)
    model, _ = half(Scaled(lambda x, weight: BY_HAND["rms"](x, weight) @ matrix.to(x.dtype)))
    assert model.mixed == ["part"] and not model.in_fp32
    model, _ = half(Scaled(lambda x, weight: BY_HAND["rms"](x, weight) @ matrix.to(x.dtype)), "pa*")
    assert not model.mixed and model.in_fp32 == {"part": NAMED}


def test_named_modules_compute_in_fp32_with_all_that_is_inside_and_others_tied_to_them_in_half() -> None:
    inner, norm, given = nn.Linear(8, 8), nn.LayerNorm(8), list[torch.dtype]()
    block = Block(nn.Sequential(inner, norm))
    block.first = nn.Linear(8, 8)
    inner.weight = block.first.weight
    norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].dtype))
    model = HalfModel(block, torch.bfloat16, ["part"])
    model.look(torch.randn(6, 8))
    block.seen.clear()
    model(torch.randn(6, 8))
    assert model.in_fp32 == {"part": NAMED} and set(given) == {torch.float32}
    assert block.seen == [torch.bfloat16]


def test_at_o3_norms_compute_in_half_too_and_only_what_is_named_in_fp32() -> None:
    given: list[torch.dtype] = []
    block = Block(norm := nn.LayerNorm(8))
    norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].dtype))
    model = HalfModel(block, torch.float16, norms=False)
    model(torch.randn(6, 4))
    assert given == [torch.float16] and not model.in_fp32, "it is not looked at either"
    assert HalfModel(Block(nn.LayerNorm(8)), torch.float16, ["part"], norms=False).in_fp32 == {"part": NAMED}


def test_the_look_leaves_buffers_and_generators_as_they_were() -> None:
    block = Block(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    before = {name: one.clone() for name, one in block.state_dict().items()}
    state = torch.get_rng_state()
    HalfModel(block, torch.float16).look(torch.ones(6, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], one) for name, one in block.state_dict().items())


def test_under_autocast_a_named_module_gets_fp32_and_a_pattern_that_fits_none_is_refused() -> None:
    block, inside = Block(nn.Linear(8, 8)), list[torch.dtype]()
    assert without_autocast(block, ["part"], "cpu") == {"part": NAMED}
    block.part.register_forward_hook(lambda one, inputs, answer: inside.append(answer.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert block.first(torch.randn(2, 4)).dtype == torch.bfloat16
        block(torch.randn(6, 4))
    assert inside == [torch.float32]
    with pytest.raises(
        Stopped, match=r"'prat' fits no module of the model; .* modules: 'first', 'part', 'last'"
    ):
        without_autocast(block, ["prat"], "cpu")
