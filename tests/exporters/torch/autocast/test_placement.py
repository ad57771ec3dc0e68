"""Casts where they move the fewest bytes: no result changes, and no placement would move fewer."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.graph.actions import Action
from halfeven.exporters.graph.mincut import BYTES_PER_CAST, Flow
from halfeven.exporters.graph.traffic import Worth, worth
from halfeven.exporters.policy.classes import CLASSES, Trait, has
from halfeven.exporters.torch.autocast.placement import (
    Placed,
    distinguishes_signs_of_zero,
    is_transparent,
    place,
)
from halfeven.exporters.torch.autocast.plan import PrecisionPlan, make_plan
from halfeven.exporters.torch.autocast.rewrite import HalfProgram, rewrite
from halfeven.exporters.torch.forms import cast_map, saved_bytes
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.corpus.case import net
from tests.nets import NETS, captured_net
from tests.programs import Original, original
from tests.slow import drawn

HALF, FP32 = True, False
ATEN = torch.ops.aten


def values(*shape: int) -> Tensor:
    """Fresh numbers of every size: normal, below half's smallest, beyond its largest, ties, zeros, infinities."""
    count = int(torch.Size(shape).numel())
    wide = torch.randn(count) * 10.0 ** torch.randint(-12, 7, (count,))
    special = torch.tensor([0.0, torch.inf, -torch.inf, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0])
    picks = special[torch.randint(len(special), (count,))]
    return torch.where(torch.rand(count) < 0.2, picks, wide).reshape(shape)


OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "view": lambda x, y: ATEN.view(x, [-1]),
    "_unsafe_view": lambda x, y: ATEN._unsafe_view(x, [-1]),
    "reshape": lambda x, y: ATEN.reshape(x.transpose(1, 2), [4, -1]),
    "view_as": lambda x, y: ATEN.view_as(x, y),
    "reshape_as": lambda x, y: ATEN.reshape_as(x, y),
    "flatten": lambda x, y: ATEN.flatten.using_ints(x, 1),
    "unflatten": lambda x, y: ATEN.unflatten.int(x, 1, [2, 2]),
    "squeeze": lambda x, y: ATEN.squeeze.dim(x[:, :1], 1),
    "unsqueeze": lambda x, y: ATEN.unsqueeze(x, 0),
    "transpose": lambda x, y: ATEN.transpose.int(x, 1, 2),
    "permute": lambda x, y: ATEN.permute(x, [3, 1, 0, 2]),
    "t": lambda x, y: ATEN.t(x[0, 0]),
    "mT": lambda x, y: ATEN.mT(x),
    "movedim": lambda x, y: ATEN.movedim.int(x, 0, 2),
    "moveaxis": lambda x, y: ATEN.moveaxis.int(x, 0, 2),
    "swapaxes": lambda x, y: ATEN.swapaxes(x, 0, 2),
    "swapdims": lambda x, y: ATEN.swapdims(x, 0, 2),
    "numpy_T": lambda x, y: ATEN.numpy_T(x[0, 0]),
    "expand": lambda x, y: ATEN.expand(x[:, :1], [2, 4, 6, 6]),
    "expand_as": lambda x, y: ATEN.expand_as(x[:, :1], y),
    "broadcast_to": lambda x, y: ATEN.broadcast_to(x[:, :1], [2, 4, 6, 6]),
    "slice": lambda x, y: ATEN.slice.Tensor(x, 2, 1, 5, 2),
    "select": lambda x, y: ATEN.select.int(x, 1, 2),
    "narrow": lambda x, y: ATEN.narrow(x, 1, 1, 2),
    "diagonal": lambda x, y: ATEN.diagonal(x, 0, 2, 3),
    "split": lambda x, y: ATEN.split.Tensor(x, 2, 1),
    "split_with_sizes": lambda x, y: ATEN.split_with_sizes(x, [1, 3], 1),
    "unsafe_split": lambda x, y: ATEN.unsafe_split.Tensor(x, 2, 1),
    "chunk": lambda x, y: ATEN.chunk(x, 3, 2),
    "unsafe_chunk": lambda x, y: ATEN.unsafe_chunk(x, 3, 2),
    "tensor_split": lambda x, y: ATEN.tensor_split.sections(x, 3, 1),
    "unbind": lambda x, y: ATEN.unbind.int(x, 1),
    "unfold": lambda x, y: ATEN.unfold(x, 2, 3, 1),
    "contiguous": lambda x, y: ATEN.contiguous(x.transpose(1, 2)),
    "clone": lambda x, y: ATEN.clone(x),
    "alias": lambda x, y: ATEN.alias(x),
    "ravel": lambda x, y: ATEN.ravel(x),
    "detach": lambda x, y: ATEN.detach(x),
    "cat": lambda x, y: ATEN.cat([x, y], 1),
    "concat": lambda x, y: ATEN.concat([x, y], 1),
    "stack": lambda x, y: ATEN.stack([x, y], 1),
    "hstack": lambda x, y: ATEN.hstack([x, y]),
    "vstack": lambda x, y: ATEN.vstack([x, y]),
    "repeat": lambda x, y: ATEN.repeat(x, [2, 1, 1, 2]),
    "tile": lambda x, y: ATEN.tile(x, [2, 1]),
    "repeat_interleave": lambda x, y: ATEN.repeat_interleave.self_int(x, 2, 1),
    "roll": lambda x, y: ATEN.roll(x, [1], [2]),
    "flip": lambda x, y: ATEN.flip(x, [2]),
    "rot90": lambda x, y: ATEN.rot90(x, 1, [2, 3]),
    "tril": lambda x, y: ATEN.tril(x),
    "triu": lambda x, y: ATEN.triu(x),
    "index": lambda x, y: ATEN.index.Tensor(x, [None, torch.tensor([3, 0, 0])]),
    "index_select": lambda x, y: ATEN.index_select(x, 1, torch.tensor([3, 0])),
    "gather": lambda x, y: ATEN.gather(x, 3, torch.zeros(2, 4, 6, 2, dtype=torch.int64)),
    "take_along_dim": lambda x, y: ATEN.take_along_dim(x, torch.zeros(2, 4, 6, 2, dtype=torch.int64), 3),
    "embedding": lambda x, y: ATEN.embedding(x[0, 0], torch.tensor([[5, 0], [2, 2]])),
    "where": lambda x, y: ATEN.where.self(torch.arange(6) % 2 == 0, x, y),
    "masked_fill": lambda x, y: ATEN.masked_fill.Scalar(x, torch.arange(6) > 3, -torch.inf),
    "constant_pad_nd": lambda x, y: ATEN.constant_pad_nd(x, [1, 2], 0.5),
    "pad": lambda x, y: ATEN.pad(x, [1, 2, 0, 1], "reflect"),
    "reflection_pad1d": lambda x, y: ATEN.reflection_pad1d(x[0], [1, 2]),
    "reflection_pad2d": lambda x, y: ATEN.reflection_pad2d(x, [1, 2, 0, 1]),
    "replication_pad1d": lambda x, y: ATEN.replication_pad1d(x[0], [1, 2]),
    "replication_pad2d": lambda x, y: ATEN.replication_pad2d(x, [1, 2, 0, 1]),
    "replication_pad3d": lambda x, y: ATEN.replication_pad3d(x, [1, 2, 0, 1, 1, 1]),
    "pixel_shuffle": lambda x, y: ATEN.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x, y: ATEN.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x, y: ATEN.channel_shuffle(x, 2),
    "im2col": lambda x, y: ATEN.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1]),
    "select_scatter": lambda x, y: ATEN.select_scatter(x, y[:, 0], 1, 2),
    "slice_scatter": lambda x, y: ATEN.slice_scatter(x, y[:, :2], 1, 1, 3),
    "neg": lambda x, y: ATEN.neg(x),
    "abs": lambda x, y: ATEN.abs(x),
    "upsample_nearest1d": lambda x, y: ATEN.upsample_nearest1d(x[0], [9]),
    "upsample_nearest2d": lambda x, y: ATEN.upsample_nearest2d.vec(x, None, [2.0, 1.5]),
    "upsample_nearest3d": lambda x, y: ATEN.upsample_nearest3d(x[None], [5, 9, 7]),
    "_upsample_nearest_exact1d": lambda x, y: ATEN._upsample_nearest_exact1d(x[0], [9]),
    "_upsample_nearest_exact2d": lambda x, y: ATEN._upsample_nearest_exact2d(x, [9, 13]),
    "_upsample_nearest_exact3d": lambda x, y: ATEN._upsample_nearest_exact3d(x[None], [5, 9, 7]),
    "relu": lambda x, y: ATEN.relu(x),
    "relu6": lambda x, y: ATEN.relu6(x),
    "hardtanh": lambda x, y: ATEN.hardtanh(x, -2.0, 0.25),
    "clamp": lambda x, y: ATEN.clamp(x, -1.0, 6.0),
    "clamp_min": lambda x, y: ATEN.clamp_min(x, 0.5),
    "clamp_max": lambda x, y: ATEN.clamp_max(x, 0.5),
    "amax": lambda x, y: ATEN.amax(x, [2, 3]),
    "amin": lambda x, y: ATEN.amin(x, [1], True),
    "fmax": lambda x, y: ATEN.fmax(x, y),
    "maximum": lambda x, y: ATEN.maximum(x, y),
    "minimum": lambda x, y: ATEN.minimum(x, y),
    "max_pool1d": lambda x, y: ATEN.max_pool1d(x[0], [3], [2], [1]),
    "max_pool2d": lambda x, y: ATEN.max_pool2d(x, [3, 3], [2, 2], [1, 1]),
    "max_pool3d": lambda x, y: ATEN.max_pool3d(x, [2, 2, 2]),
}


def test_every_transparent_op_is_tried() -> None:
    listed = [found.aten for found in CLASSES if found.traits & {Trait.MOVES, Trait.SELECTS}]
    assert set(OPS) == set().union(*listed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", sorted(OPS))
def test_rounding_before_a_transparent_op_is_rounding_after_it(name: str, dtype: torch.dtype) -> None:
    for _ in range(4):
        x, y = values(2, 4, 6, 6), values(2, 4, 6, 6)
        after, before = OPS[name](x, y), OPS[name](x.to(dtype), y.to(dtype))
        wide = OPS[name](x.to(dtype).float(), y.to(dtype).float())
        assert len(list(pieces(after))) == len(list(pieces(before))) > 0
        for a, b, w in zip(pieces(after), pieces(before), pieces(wide), strict=True):
            assert b.dtype == dtype and torch.equal(a.to(dtype), b) and torch.equal(w, b.float())
            if has(name, Trait.MOVES):
                assert torch.equal(a.to(dtype).view(torch.int16), b.view(torch.int16)), "a sign of a zero"


def pieces(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def of(forward: Callable[..., Any], x: Tensor, **weights: nn.Module | Tensor) -> Original:
    return original(net(forward, **weights), {"x": x})


@pytest.mark.parametrize(
    ("fill", "movable"), [(0.0, True), (-torch.inf, True), (6.0, True), (-1e9, False), (0.1, False)]
)
def test_an_op_whose_number_half_does_not_represent_is_not_transparent(fill: float, movable: bool) -> None:
    model = of(lambda self, x: x.masked_fill(x > 1, fill), torch.randn(4, 8))
    node = next(n for n in runnable(model.program).graph.nodes if "masked_fill" in n.name)
    assert is_transparent(node, torch.float16, signs_of_zero_matter=False) is movable


def test_a_program_that_divides_by_a_computed_value_tells_signs_of_zero() -> None:
    for function, distinguishes in (
        (lambda self, x: x.relu() / 8, False),
        (lambda self, x: 1 / x.relu(), True),
        (lambda self, x: x.relu() / x.sum(-1, keepdim=True), True),
        (lambda self, x: x.relu() ** 2, False),
    ):
        assert (
            distinguishes_signs_of_zero(runnable(of(function, torch.randn(4, 8)).program).graph)
            is distinguishes
        )


# --- the cut ------------------------------------------------------------------------------------------------


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """A random flow: some fixed nodes, some transparent ones, a split, readers of both kinds, weights."""
    flow = Flow()
    for index in range(draw(st.integers(1, 3))):
        name = f"x{index}"
        flow.sides[name], flow.numel[name] = draw(st.booleans()), draw(st.integers(0, 9))
        if draw(st.integers(0, 3)) == 0:
            flow.rounded.add(name)
    for index in range(draw(st.integers(1, 9))):
        name, known = (
            f"n{index}",
            [value for value in flow.sides if value not in flow.transparent or value in flow.numel],
        )
        flow.sources[name] = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
        side = draw(st.booleans())
        kind = draw(st.sampled_from(["transparent", "transparent", "fixed", "split"]))
        flow.sides[name] = side
        if kind == "fixed":
            flow.reads[name] = draw(st.booleans())
        else:
            flow.transparent[name] = draw(st.integers(0, 3))
        if kind == "split":
            for piece in (f"{name}a", f"{name}b"):
                flow.tied[piece], flow.sides[piece] = name, side
                flow.numel[piece] = draw(st.integers(0, 9))
        else:
            flow.numel[name] = draw(st.integers(0, 9))
    for index, value in enumerate(draw(st.lists(st.sampled_from(list(flow.numel)), max_size=3))):
        flow.sources[f"output {index}"], flow.reads[f"output {index}"] = [value], draw(st.booleans())
    return flow


def answers(flow: Flow, sides: dict[str, bool]) -> dict[str, frozenset[tuple[str, bool]]]:
    """The values that every fixed reader sees: for each way from a value that is computed, True if it is rounded on
    that way."""
    seen: dict[str, frozenset[tuple[str, bool]]] = {}

    def holds(value: str) -> frozenset[tuple[str, bool]]:
        root = flow.root(value)
        if root in flow.transparent:
            inside = frozenset[tuple[str, bool]]().union(*(holds(source) for source in flow.sources[root]))
        else:
            inside = frozenset({(value, value in flow.rounded)})
        return frozenset((s, rounded or sides[root if root in sides else value]) for s, rounded in inside)

    for reader, side in flow.reads.items():
        inside = frozenset[tuple[str, bool]]().union(*(holds(source) for source in flow.sources[reader]))
        seen[reader] = frozenset((source, rounded or side) for source, rounded in inside)
    return seen


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(flows())
def test_no_assignment_of_the_movable_nodes_casts_fewer_bytes_and_none_changes_an_answer(flow: Flow) -> None:
    free = flow.movable()
    before = answers(flow, flow.sides)
    fewest = flow.cast_bytes(flow.sides)
    for choice in itertools.product((HALF, FP32), repeat=len(free)):
        chosen = dict(zip(free, choice, strict=True))
        sides = {name: chosen.get(flow.root(name), side) for name, side in flow.sides.items()}
        assert answers(flow, sides) == before
        fewest = min(fewest, flow.cast_bytes(sides))
    assert flow.cast_bytes(flow.cut(free)) == fewest


def test_what_a_half_node_rounds_anyway_may_be_rounded_before_it() -> None:
    flow = Flow(
        sides={"x": FP32, "early": FP32, "late": HALF},
        numel={"x": 10, "early": 40, "late": 40},
        sources={"early": ["x"], "late": ["early"], "reader": ["late"]},
        reads={"reader": FP32},
        transparent={"early": 40, "late": 40},
    )
    assert flow.movable() == ["early"], "late rounds what an FP32 reader sees: it must stay"
    sides = flow.cut(flow.movable())
    assert sides["early"] is HALF
    assert (flow.cast_bytes(flow.sides), flow.cast_bytes(sides)) == (80 * BYTES_PER_CAST, 50 * BYTES_PER_CAST)


def test_a_tensor_that_many_read_in_another_dtype_is_cast_once() -> None:
    flow = Flow(
        sides={"x": FP32},
        numel={"x": 10},
        sources={"a": ["x"], "b": ["x"], "c": ["x"]},
        reads={"a": HALF, "b": HALF, "c": FP32},
    )
    assert flow.cast_bytes(flow.sides) == 10 * BYTES_PER_CAST


# --- whole programs -----------------------------------------------------------------------------------------


def placed(
    model: Original, level: str = "O1", lists: str = "cuda", keep: tuple[str, ...] = ()
) -> tuple[PrecisionPlan, Placed, GraphModule]:
    module = runnable(model.program)
    plan = make_plan(module, Precision(level, "fp16", keep=keep), lists)
    return (
        plan,
        place(module, plan, model.example, [tensor.type.torch for tensor in model.spec.outputs]),
        module,
    )


def converted(model: Original, plan: PrecisionPlan) -> HalfProgram:
    return rewrite(model.program, plan, model.spec, model.example)


def cast_bytes(half: HalfProgram) -> int:
    return sum(cast.bytes for cast in cast_map(half.program))


def agree(model: Original, plan: PrecisionPlan, result: Placed, *inputs: Tensor) -> None:
    """The placed program answers bit for bit as the unplaced one, and casts as many bytes as was foretold."""
    one, other = converted(model, plan), converted(model, result.plan)
    with torch.inference_mode():
        first = runnable(one.program)(*[x.clone() for x in inputs])
        second = runnable(other.program)(*[x.clone() for x in inputs])
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert result.bytes_after <= result.bytes_before
    assert cast_bytes(other) <= cast_bytes(one)
    assert (cast_bytes(one) - cast_bytes(other)) == result.bytes_before - result.bytes_after


EVERY_NET = [(name, level, lists) for name in NETS for level in ("O1", "O2") for lists in ("cuda", "cpu")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level", "lists"), drawn(2, EVERY_NET))
def test_placing_changes_no_bit_of_any_net(name: str, level: str, lists: str) -> None:
    model = captured_net(name)
    plan, result, _ = placed(model, level, lists)
    agree(model, plan, result, *NETS[name].inputs(8).values())


@pytest.mark.slow
def test_what_shrinks_an_fp32_tensor_on_its_way_to_half_runs_before_the_cast_and_what_grows_it_after() -> (
    None
):
    linear = nn.Linear(16, 8)

    def grows(self: Any, x: Tensor) -> Tensor:
        return F.linear(x.exp().repeat(1, 4), self.linear.weight, self.linear.bias)

    def shrinks(self: Any, x: Tensor) -> Tensor:
        return self.linear(F.max_pool1d(x.exp().unsqueeze(1), 4).squeeze(1).to(torch.float32))

    model = of(grows, torch.randn(8, 4), linear=linear)
    plan, result, _ = placed(model)
    assert result.moved == ("repeat",) and result.plan.actions["repeat"] is Action.HALF
    assert (result.bytes_before - result.bytes_after) == 6 * 3 * (16 - 4)
    agree(model, plan, result, torch.randn(5, 4))

    model = of(shrinks, torch.randn(8, 64), linear=linear)
    plan, result, _ = placed(model)
    assert result.moved == ()
    agree(model, plan, result, torch.randn(5, 64))


@pytest.mark.slow
def test_an_upsampling_that_cuda_autocast_has_in_fp32_between_half_layers_runs_in_half() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.two(F.interpolate(self.one(x), scale_factor=2.0, mode="nearest").flip(2))

    model = of(forward, torch.randn(8, 3, 6, 6), one=nn.Conv2d(3, 4, 3), two=nn.Conv2d(4, 2, 3))
    plan, result, _ = placed(model)
    assert set(result.moved) == {"upsample_nearest2d", "flip"}
    assert converted(model, plan).casts - converted(model, result.plan).casts == 2
    agree(model, plan, result, torch.randn(5, 3, 6, 6))
    assert result.plan.fp32_by_policy == plan.fp32_by_policy - 1


@pytest.mark.slow
def test_a_value_that_an_fp32_reader_sees_unrounded_is_never_rounded() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.cat([x.exp(), x.exp().relu()], 1).reshape(-1, 4, 8)
        return self.linear(wide), self.linear(wide.transpose(1, 2).contiguous().transpose(1, 2)) + wide.exp()

    model = of(forward, torch.randn(8, 16), linear=nn.Linear(8, 8))
    plan, result, _ = placed(model)
    assert "reshape" not in result.moved and "view" not in result.moved
    assert not any(name.startswith("cat") for name in result.moved)
    agree(model, plan, result, torch.randn(5, 16))


def test_a_rounding_that_an_fp32_reader_sees_stays() -> None:
    """The flip is half by its level O2; its input and its reader are kept in FP32."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return x.sin().flip(1).cos()

    model = of(forward, torch.randn(8, 16))
    plan, result, _ = placed(model, "O2", keep=("op:sin", "op:cos"))
    assert result.moved == () and result.bytes_before > 0
    agree(model, plan, result, torch.randn(5, 16))


@pytest.mark.slow
def test_followers_of_a_moved_node_keep_their_precision_by_an_explicit_action() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        up = F.interpolate(self.one(x), scale_factor=2.0, mode="nearest")  # FP32 by list
        return self.two(up) + up.max()  # max follows: FP32, although up comes to be half

    model = of(forward, torch.randn(8, 3, 6, 6), one=nn.Conv2d(3, 4, 3), two=nn.Conv2d(4, 4, 1))
    plan, result, _ = placed(model)
    agree(model, plan, result, torch.randn(5, 3, 6, 6))


@pytest.mark.slow
def test_a_view_whose_memory_is_written_to_later_stays_as_it_is() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        base = x.exp()
        seen = base.repeat(1, 1).flatten(1)
        other = base.view(-1, 2, 2)
        base.add_(1)
        return self.linear(other.flatten(1).repeat(1, 4)) + self.linear(seen.repeat(1, 4))

    model = of(forward, torch.randn(8, 4), linear=nn.Linear(16, 8))
    plan, result, module = placed(model)
    written = {n.name for n in module.graph.nodes if n.name.startswith(("view", "exp"))}
    assert written.isdisjoint(result.moved) and result.moved
    agree(model, plan, result, torch.randn(5, 4))


@pytest.mark.slow
def test_a_move_that_would_give_a_computing_node_other_strides_is_not_made() -> None:
    """Cast after it, an expanded tensor is dense; cast before it, it is not, and a kernel may sum otherwise."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.matmul(x.exp().unsqueeze(1).expand(-1, 4, -1), self.weight)

    model = of(forward, torch.randn(8, 16), weight=torch.randn(16, 8))
    plan, result, _ = placed(model)
    assert result.moved == () and result.bytes_before == result.bytes_after
    agree(model, plan, result, torch.randn(5, 16))


@pytest.mark.slow
@pytest.mark.parametrize("patterns", [("op:flip",), ("flip",)])
def test_what_was_asked_to_be_kept_in_fp32_is_left_there(patterns: tuple[str, ...]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.two(self.one(x).flip(1))

    model = of(forward, torch.randn(8, 16), one=nn.Linear(16, 8), two=nn.Linear(8, 4))
    plan, result, _ = placed(model, keep=patterns)
    assert result.moved == () and result.plan.actions["flip"] is Action.FP32
    agree(model, plan, result, torch.randn(5, 16))


# --- what casts cost ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cast_map_names_each_cast_with_its_bytes_and_readers() -> None:
    model = of(
        lambda self, x: (self.one(x).softmax(-1), self.two(x)),
        torch.randn(8, 16),
        one=nn.Linear(16, 8),
        two=nn.Linear(16, 4),
    )
    plan, _, _ = placed(model, lists="cpu")
    first, *rest = cast_map(converted(model, plan).program)
    assert (first.from_dtype, first.to_dtype) == ("float32", "float16")
    assert first.bytes == 3 * 16 * 6 and len(first.readers) == 2
    assert sorted(cast.bytes for cast in rest) == [3 * 4 * 6, 3 * 8 * 6]
    assert all(cast.readers == ("output",) and cast.to_dtype == "float32" for cast in rest)


@pytest.mark.slow
def test_half_pays_for_a_large_layer_and_buys_nothing_around_a_tiny_one() -> None:
    large = of(
        lambda self, x: self.two(self.one(x)), torch.randn(8, 64), one=nn.Linear(64, 64), two=nn.Linear(64, 8)
    )
    tiny = of(lambda self, x: self.one(x.exp()).exp(), torch.randn(8, 2000, 1), one=nn.Linear(1, 1))
    for model, pays in ((large, True), (tiny, False)):
        half = converted(model, placed(model)[0])
        found = worth(saved_bytes(half.program), cast_bytes(half))
        assert found.pays is pays, found.reason
    whole_bytes = 2 * (64 * 64 + 64 + 64 * 8 + 8) + 2 * 3 * (64 + 64 + 64 + 8)
    assert saved_bytes(converted(large, placed(large)[0]).program) == whole_bytes


def test_half_that_saves_no_more_than_its_casts_cost_is_not_recommended() -> None:
    assert worth(100, 100) == Worth(100, 100, False, worth(100, 100).reason)
    assert "half buys nothing" in worth(100, 100).reason and "FP32" in worth(100, 100).reason
    assert worth(2_500_000, 100).pays and "2.5 MB" in worth(2_500_000, 100).reason
    assert not worth(0, 0).pays
