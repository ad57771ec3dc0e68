"""Half precision in FP32 storage: the same numbers as true half kernels give, and the floor beneath them."""

import random

import pytest
import torch
from halfeven.exporters.graph.actions import Kept
from halfeven.exporters.torch.autocast import earlier_runs
from halfeven.exporters.torch.autocast.dtypes import Dtypes, Typing
from halfeven.exporters.torch.autocast.earlier_runs import EarlierRuns
from halfeven.exporters.torch.autocast.emulation import (
    Emulation,
    RoundedWeights,
    half_rounding,
    mantissa_rounding,
)
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import Autocast, rewrite
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable, walk
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Node

from tests.nets import NETS, captured_net
from tests.programs import Original, original
from tests.slow import slow_part_but

U = 2.0**-11


def net(forward: object, **parts: nn.Module) -> nn.Module:
    module = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def emulate(
    model: Original, precision: Precision, *tensors: Tensor, mantissa: bool = False
) -> tuple[Tensor, ...]:
    module = runnable(model.program)
    plan = make_plan(module, precision)
    rounding = (mantissa_rounding if mantissa else half_rounding)(plan.dtype)
    with torch.inference_mode():
        emulation = Emulation(module, Typing(module, model.example).under(plan), rounding)
        return tuple(emulation.run(*[tensor.clone() for tensor in tensors]))


def true_half(model: Original, precision: Precision, *tensors: Tensor) -> tuple[Tensor, ...]:
    module = runnable(model.program)
    half = rewrite(model.program, make_plan(module, precision), model.spec, model.example)
    with torch.inference_mode():
        return tuple(runnable(half.program)(*[tensor.clone() for tensor in tensors]))


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, in u of the largest value."""
    return float((one - other).abs().max() / (U * other.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("level", slow_part_but(2, {"O1"}, ["O1", "O2", "O3"]))
@pytest.mark.parametrize("name", NETS)
def test_it_gives_what_true_half_kernels_give(name: str, level: str) -> None:
    """The results are equal up to the order in which products are summed, which may change the last bits of a half."""
    model = captured_net(name)
    tensors = list(NETS[name].inputs(5).values())
    pairs = zip(
        emulate(model, Precision(level), *tensors), true_half(model, Precision(level), *tensors), strict=True
    )
    for emulated, true in pairs:
        assert apart(emulated.to(true.dtype), true) <= 4.0


def test_a_second_run_remembers_nothing_of_the_first() -> None:
    """The input is read in half and also given back as it is."""
    model = original(
        net(lambda self, x: (self.linear(x), x), linear=nn.Linear(4, 4)), {"x": torch.randn(8, 4)}
    )
    module = runnable(model.program)
    dtypes = Typing(module, model.example).under(make_plan(module, Precision()))
    emulation = Emulation(module, dtypes, half_rounding(torch.float16))
    for rows in (3, 1, 3):
        x = torch.randn(rows, 4)
        given, same = emulation.run(x)
        assert torch.equal(same, x) and apart(given, model.run(x)[0]) < 4.0


def test_a_weight_is_rounded_once_for_all_halves_of_a_module() -> None:
    linear = nn.Linear(4, 5)
    model = original(net(lambda self, x: self.linear(x), linear=linear), {"x": torch.randn(8, 4)})
    module, rounded = runnable(model.program), list[torch.Size]()
    dtypes = Typing(module, model.example).under(make_plan(module, Precision()))

    def rounding(value: Tensor) -> Tensor:
        rounded.append(value.shape)
        return half_rounding(torch.float16)(value)

    known, x = RoundedWeights(), torch.randn(3, 4)
    answers = [Emulation(module, dtypes, rounding, weights=one).run(x)[0] for one in (known, known, None)]
    assert rounded.count(linear.weight.shape) == 2 and rounded.count(x.shape) == 3
    assert all(torch.equal(answers[0], one) for one in answers)


class Counted(Emulation):
    """Counts the operations that are computed."""

    computed = 0

    def _called(self, node: Node, args: object, kwargs: object) -> object:
        self.computed += 1
        return super()._called(node, args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_half_goes_on_where_its_plan_begins_to_differ_and_answers_the_same_bits(name: str) -> None:
    """Any order of plans and inputs: those before decide what is taken over, never an answer."""
    model, chance = captured_net(name), random.Random()
    module = runnable(model.program)
    typing, plan, earlier = Typing(module, model.example), make_plan(module, Precision()), EarlierRuns(module)
    names = [name for name, node in walk(module) if name in plan.actions]
    inputs = [list(NETS[name].inputs(rows).values()) for rows in (3, 2)]
    saved = 0
    for _ in range(12):
        tail = chance.randrange(len(names))
        kept = [Kept(one, "", "") for one in names[tail:] if chance.random() < 0.5]
        dtypes = typing.under(plan.keeping(kept))
        alone, after = (
            Counted(module, dtypes, half_rounding(plan.dtype), earlier=e) for e in (None, earlier)
        )
        for tensors in inputs:
            pairs = zip(*(one.run(*[t.clone() for t in tensors]) for one in (alone, after)), strict=True)
            assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)
        saved += alone.computed - after.computed
    assert saved > 0 or not earlier.decisions(typing.under(plan))


def test_values_are_held_within_their_bytes_and_the_last_used_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = original(
        net(lambda self, x: self.b(self.a(x).relu()).relu() + 1, a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
        {"x": torch.randn(8, 4)},
    )
    module = runnable(model.program)
    dtypes, earlier = Typing(module, model.example).under(make_plan(module, Precision())), EarlierRuns(module)
    monkeypatch.setattr(earlier_runs, "BYTES", 1 << 9)

    def computed(x: Tensor) -> int:
        emulation = Counted(module, dtypes, half_rounding(torch.float16), earlier=earlier)
        emulation.run(x)
        return emulation.computed

    first, others = torch.randn(3, 4), [torch.randn(3, 4) for _ in range(40)]
    whole = computed(first)
    for x in others:
        assert computed(x) == whole and computed(first) < whole
    assert computed(others[0]) == whole and sum(size for _, size in earlier.held.values()) <= 1 << 9
    earlier.forget()
    assert computed(first) == whole


@pytest.mark.parametrize("name", NETS)
def test_a_plan_with_nothing_in_half_gives_the_original_bit_for_bit(name: str) -> None:
    model = captured_net(name)
    tensors = list(NETS[name].inputs(3).values())
    for emulated, exact in zip(
        emulate(model, Precision("O0"), *tensors), model.run(*[t.clone() for t in tensors]), strict=True
    ):
        assert torch.equal(emulated, exact)


class _Dtypes(Autocast):
    """The rewrite's own interpretation, with every result's dtypes written down."""

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        self.seen = getattr(self, "seen", {})
        if isinstance(result, Tensor):
            self.seen[n.name] = result.dtype
        return result


@pytest.mark.parametrize("level", slow_part_but(2, {"O1"}, ["O1", "O2", "O3"]))
@pytest.mark.parametrize("name", NETS)
def test_inferred_dtypes_are_those_of_the_rewrite(name: str, level: str) -> None:
    model = captured_net(name)
    module = runnable(model.program)
    plan = make_plan(module, Precision(level))
    inferred: Dtypes = Typing(module, model.example).under(plan)
    interpreter = _Dtypes(runnable(model.program), plan)
    with torch.inference_mode():
        interpreter.run(*NETS[name].inputs(3).values())
    assert {node: inferred.out[node] for node in interpreter.seen} == {
        node: (dtype,) for node, dtype in interpreter.seen.items()
    }


def test_a_second_plan_is_inferred_from_what_is_known() -> None:
    model = captured_net("encoder")
    module = runnable(model.program)
    typing = Typing(module, model.example)
    one = typing.under(make_plan(module, Precision("O1")))
    other = typing.under(make_plan(module, Precision("O1", "bf16")))
    assert one.half == torch.float16 and other.half == torch.bfloat16
    assert typing.under(make_plan(module, Precision("O1"))) == one
    assert [node for node in one.out if one.is_half(node)] == [
        node for node in other.out if other.is_half(node)
    ]


@given(st.floats(width=32), st.sampled_from([torch.float16, torch.bfloat16]))
def test_the_floor_rounds_the_mantissa_as_half_does_and_leaves_the_range(
    value: float, half: torch.dtype
) -> None:
    number = torch.tensor([value], dtype=torch.float32)
    floor = mantissa_rounding(half)(number)
    if not torch.isfinite(number).all():
        assert torch.equal(floor.isnan(), number.isnan()) and torch.equal(floor.isinf(), number.isinf())
        return
    info = torch.finfo(half)
    if info.smallest_normal <= abs(value) < info.max:
        assert torch.equal(floor, half_rounding(half)(number))
    smallest_normal = torch.finfo(torch.float32).smallest_normal
    if smallest_normal <= abs(value) < 3e38:
        assert (floor - number).abs() <= number.abs() * (2.0**-11 if half == torch.float16 else 2.0**-8)


def test_what_overflows_in_half_does_not_on_the_floor() -> None:
    model = original(net(lambda self, x: (x @ x.transpose(1, 2)) / 1e4), {"x": 300 * torch.randn(4, 3, 8)})
    x = 300 * torch.randn(2, 3, 8)
    (exact,), (half,), (floor,) = (
        model.run(x), emulate(model, Precision(), x), emulate(model, Precision(), x, mantissa=True)
    )  # fmt: skip
    assert half.isinf().any() and apart(floor, exact) < 4.0


def test_a_half_that_is_changed_in_place_is_rounded_where_it_stands() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.get_submodule("linear")(x)
        hidden[:, :2].mul_(1.0 / 3.0)
        return hidden

    model = original(net(forward, linear=nn.Linear(8, 4)), {"x": torch.randn(8, 8)})
    x = torch.randn(5, 8)
    (emulated,) = emulate(model, Precision(), x)
    assert torch.equal(emulated, emulated.half().float())
    assert torch.equal(emulated, true_half(model, Precision(), x)[0])


def with_constant(forward: object, value: float) -> Original:
    module = net(forward, linear=nn.Linear(4, 4))
    module.register_buffer("constant", torch.tensor(value))
    return original(module, {"x": torch.randn(4, 4)})


def test_a_constant_that_half_is_compared_with_is_as_small_as_half_makes_it() -> None:
    """``0 >= 1e-9`` is true in half, where 1e-9 is 0."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (self.get_submodule("linear")(x) * 0.0 >= self.get_buffer("constant")).float()

    model, x = with_constant(forward, 1e-9), torch.randn(2, 4)
    assert not model.run(x)[0].any()
    assert emulate(model, Precision(), x)[0].all()
    assert torch.equal(emulate(model, Precision(), x)[0], true_half(model, Precision(), x)[0])


def test_a_constant_beyond_half_is_infinite_as_on_a_gpu() -> None:
    """A CPU's kernels read it as a scalar in FP32; a plan is made for both."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.get_submodule("linear")(x) * 1e-3 * self.get_buffer("constant")

    model, x = with_constant(forward, 1e5), torch.randn(2, 4)
    assert emulate(model, Precision(), x)[0].isinf().all()
    assert emulate(model, Precision(), x, mantissa=True)[0].isfinite().all()


class Choosing(nn.Module):
    """A branch of products or of a sum; a loop that halves until it is small; a running state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cond(x.sum() > 0, lambda t: self.linear(t), lambda t: t + 1.0, (x,))
        return self.linear(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_control_flow_takes_the_branch_that_the_original_takes(sign: float) -> None:
    model = original(Choosing(), {"x": torch.randn(4, 4)})
    x = sign * torch.rand(3, 4)
    (emulated,), (exact,) = emulate(model, Precision(), x), model.run(x)
    assert 0.0 < apart(emulated, exact) < 4.0
    assert apart(emulated, true_half(model, Precision(), x)[0]) <= 2.0
