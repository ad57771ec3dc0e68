"""The half program: each weight rounded once and stored once, and what each level computes in half."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from halfeven.exporters.graph.actions import Action
from halfeven.exporters.torch.autocast.dtypes import Typing
from halfeven.exporters.torch.autocast.emulation import Emulation, half_rounding
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import CASTS, HalfProgram, rewrite, stored_bytes
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from tests.corpus.case import net
from tests.nets import NETS, captured_net
from tests.programs import Original, original

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@cache
def converted(name: str, level: str = "O1", dtype: str = "fp16", lists: str = "cpu") -> HalfProgram:
    return half_of(captured_net(name), Precision(level, dtype), lists)


def half_of(model: Original, precision: Precision, lists: str = "cpu") -> HalfProgram:
    plan = make_plan(runnable(model.program), precision, lists)
    return rewrite(model.program, plan, model.spec, model.example)


def emulation(model: Original, half: HalfProgram) -> Emulation:
    module = runnable(model.program)
    dtypes = Typing(module, model.example).under(half.plan)
    return Emulation(module, dtypes, half_rounding(half.plan.dtype))


def run(program: ExportedProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return tuple(runnable(program)(*[tensor.clone() for tensor in tensors]))


def live(program: ExportedProgram, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(tensors[0].device.type, dtype=dtype):
        return run(program, *tensors)


def calls(program: ExportedProgram, *names: str) -> list[Node]:
    return [node for node in program.graph.nodes if str(node.target) in {f"aten.{name}" for name in names}]


def casts(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if node.target in CASTS]


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_it_really_computes_in_half(name: str) -> None:
    half = converted(name)
    assert 0 < half.half_nodes <= half.nodes
    tensors = list(NETS[name].inputs(5).values())
    expected, came = run(captured_net(name).program, *tensors), run(half.program, *tensors)
    assert any(not torch.equal(one, other) for one, other in zip(expected, came, strict=True))


@pytest.mark.parametrize("name", NETS)
def test_no_weight_is_cast_when_the_program_runs(name: str) -> None:
    program = converted(name).program
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    from_weights = [
        node
        for node in casts(program)
        if isinstance(source := node.args[0], Node)
        and source.op == "placeholder"
        and source.name not in inputs
    ]
    assert from_weights == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NETS.keys() - {"island"}))  # where the user casts as well
@pytest.mark.parametrize("lists", ["cpu", "cuda"])
def test_no_tensor_is_cast_twice_to_the_same_type(name: str, lists: str) -> None:
    made = [(node.args[0], dtype_of(node)) for node in casts(converted(name, lists=lists).program)]
    assert len(made) == len(set(made))


def test_weights_that_are_read_in_half_are_stored_in_half_and_nowhere_else() -> None:
    half = converted("mlp")
    weights = 8 * 16 + 16 + 16 * 3 + 3
    assert (half.bytes, half.bytes_fp32) == (2 * weights, 4 * weights)
    assert {tensor.dtype for tensor in half.program.state_dict.values()} == {torch.float16}
    assert stored_bytes(half.program) == half.bytes


@pytest.mark.slow
def test_statistics_that_are_read_in_fp32_stay_fp32() -> None:
    state = converted("residual").program.state_dict
    assert {name.rpartition(".")[0] for name, t in state.items() if t.dtype == torch.float32} == {"norm"}
    assert "norm.num_batches_tracked" not in state, "nothing reads it"


def test_a_weight_that_is_read_in_both_precisions_is_stored_twice() -> None:
    half = converted("tied")
    dtypes = sorted(str(t.dtype) for t in half.program.state_dict.values() if t.shape == (32, 16))
    assert dtypes == ["torch.float16", "torch.float32"]
    # embed as FP32 and half; linear once, though it is read as it is and transposed; head.bias
    assert half.bytes == 32 * 16 * 6 + 16 * 16 * 2 + 32 * 2


@pytest.mark.slow
def test_tied_and_transposed_weights_are_rounded_once(tmp_path: Path) -> None:
    one, other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    other.weight = one.weight
    module = net(lambda self, x: self.other(self.one(x)) @ self.one.weight.t(), one=one, other=other)
    model = original(module, {"x": torch.randn(8, 8)})
    save_program(model.program, tmp_path / "original.pt2", weights=True)
    loaded = Original(load_program(tmp_path / "original.pt2"), model.spec, model.example)
    for tied in (model, loaded):
        half = half_of(tied, Precision())
        assert (half.bytes, half.bytes_fp32) == (8 * 8 * 2, 8 * 8 * 4)
        save_program(half.program, tmp_path / "half.pt2", weights=True)
        assert stored_bytes(load_program(tmp_path / "half.pt2")) == half.bytes


@pytest.mark.slow
def test_two_weights_whose_paths_differ_in_a_dot_do_not_become_one() -> None:
    def both(x: Tensor, weight: Tensor) -> Tensor:
        """A weight that is read in half by the product, in FP32 by the sum."""
        return F.linear(x, weight) + (x[:, None, :] * weight).sum(-1)

    inner = nn.Module()
    inner.register_parameter("b", nn.Parameter(torch.randn(4, 4)))
    module = net(lambda self, x: both(x, self.a.b) - both(x, self.a_b), a=inner, a_b=torch.randn(4, 4))
    model, x = original(module, {"x": torch.randn(8, 4)}), torch.randn(3, 4)
    half = half_of(model, Precision())
    assert half.bytes == 2 * 4 * 4 * (2 + 4)
    assert torch.equal(run(half.program, x)[0], live(model.program, torch.half, x)[0].float())


@pytest.mark.slow
def test_O0_is_the_original_bit_for_bit() -> None:
    for name in ("encoder", "residual"):
        half = converted(name, "O0", lists="cuda")
        tensors = list(NETS[name].inputs(4).values())
        assert half.half_nodes == half.casts == 0
        assert torch.equal(run(half.program, *tensors)[0], run(captured_net(name).program, *tensors)[0])


@pytest.mark.slow
def test_O2_computes_normalisation_in_fp32_and_gives_it_back_in_half() -> None:
    for name, op in (("residual", "batch_norm.default"), ("encoder", "layer_norm.default")):
        program = converted(name, "O2", lists="cuda").program
        for norm in calls(program, op):
            assert {dtype_of(arg) for arg in norm.all_input_nodes} == {torch.float32}
            assert {dtype_of(user) for user in norm.users} == {torch.float16}
        assert calls(program, op), "the net has none"


@pytest.mark.slow
def test_O3_is_half_everywhere_and_gives_the_specs_datatypes() -> None:
    half = converted("encoder", "O3", lists="cuda")
    norms = calls(half.program, "layer_norm.default", "softmax.int", "embedding.default")
    assert {dtype_of(node) for node in norms} == {torch.float16}
    assert {t.dtype for t in half.program.state_dict.values() if t.is_floating_point()} == {torch.float16}
    assert half.bytes * 2 == half.bytes_fp32
    assert run(half.program, *NETS["encoder"].inputs(2).values())[0].dtype == torch.float32


@pytest.mark.slow
def test_embeddings_are_half_where_that_is_asked_for() -> None:
    for embeddings, dtype in (("keep", torch.float32), ("half", torch.float16)):
        half = half_of(captured_net("encoder"), Precision(embeddings=embeddings), "cuda")
        assert [dtype_of(node) for node in calls(half.program, "embedding.default")] == [dtype]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_integers_booleans_and_float64_stay_what_they_are(level: str) -> None:
    linear = nn.Linear(4, 4)
    module = net(
        lambda self, x: (self.linear(x), (x > 0).long().cumsum(1), x > 0, x.double().sin() * 1e300),
        linear=linear,
    )
    model = original(module, {"x": torch.randn(8, 4)})
    x = torch.randn(5, 4)
    came = run(half_of(model, Precision(level), "cuda").program, x)
    assert [t.dtype for t in came] == [torch.float32, torch.int64, torch.bool, torch.float64]
    assert torch.equal(came[1], (x > 0).long().cumsum(1)) and torch.equal(came[2], x > 0)
    assert came[3].isfinite().all() and came[3].abs().max() > 1e290


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_changes_in_place_are_neither_lost_nor_remembered(level: str) -> None:
    model = captured_net("in place")
    program = half_of(model, Precision(level), "cuda").program
    module = runnable(program)
    x = torch.randn(4, 4)
    with torch.inference_mode():
        first, second = module(x.clone())[0], module(x.clone())[0]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, model.run(x)[0], rtol=2e-2, atol=2e-2)


def test_a_cast_is_made_anew_after_its_tensor_was_changed_in_place() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        before = F.linear(x, self.get_parameter("weight"))
        x.mul_(3.0)
        return before + F.linear(x, self.get_parameter("weight"))

    model = original(net(forward, weight=nn.Parameter(torch.randn(4, 4))), {"x": torch.randn(8, 4)})
    x = torch.randn(3, 4)
    assert torch.equal(
        run(half_of(model, Precision()).program, x)[0], live(model.program, torch.half, x)[0].float()
    )


@pytest.mark.slow
def test_a_loop_over_time_in_one_op_stays_fp32_whatever_comes_before_it() -> None:
    """The lists act inside it, where the plan cannot look, and a CPU has no FP16 kernel for an LSTM."""
    linear, lstm = nn.Linear(4, 8), nn.LSTM(8, 4, batch_first=True)
    model = original(
        net(lambda self, x: self.lstm(self.linear(x))[0], linear=linear, lstm=lstm),
        {"x": torch.randn(8, 5, 4)},
    )
    for level in ("O1", "O3"):
        half = half_of(model, Precision(level), "cuda")
        assert half.half_nodes > 0
        assert (len(half.plan.kept) == 1) == (level == "O3")
        x = torch.randn(3, 5, 4)
        torch.testing.assert_close(run(half.program, x)[0], model.run(x)[0], rtol=1e-2, atol=5e-3)


def test_a_kept_node_computes_in_fp32() -> None:
    precision = Precision("O3", keep=("op:linear",))
    half = half_of(captured_net("mlp"), precision, "cuda")
    assert {dtype_of(node) for node in calls(half.program, "linear.default")} == {torch.float32}
    assert [dtype_of(node) for node in calls(half.program, "tanh.default")] == [torch.float16]
    assert half.bytes == half.bytes_fp32
    assert {half.plan.actions[kept.node] for kept in half.plan.kept} == {Action.FP32}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["mlp", "residual", "encoder", "tied", "pictures"])
def test_the_emulation_is_within_a_rounding_of_true_half(name: str, dtype: str) -> None:
    half = converted(name, dtype=dtype, lists="cuda")
    tensors = list(NETS[name].inputs(6).values())
    with torch.inference_mode():
        emulated = emulation(captured_net(name), half).run(*[tensor.clone() for tensor in tensors])[0]
    true, exact = run(half.program, *tensors)[0], run(captured_net(name).program, *tensors)[0]
    scale, u = exact.abs().max(), torch.finfo(HALF[dtype]).eps / 2
    assert (emulated - true).abs().max() <= 3 * u * scale
    assert not torch.equal(emulated, exact)


@pytest.mark.slow
def test_the_emulation_takes_ops_that_give_several_tensors() -> None:
    module = net(lambda self, x: self.cell(x)[1], cell=nn.LSTMCell(4, 4))
    model = original(module, {"x": torch.randn(8, 4)})
    half = half_of(model, Precision(), "cuda")
    x = torch.randn(3, 4)
    with torch.inference_mode():
        emulated = emulation(model, half).run(x.clone())[0]
    torch.testing.assert_close(emulated, run(half.program, x)[0], rtol=1e-2, atol=2e-3)


def test_the_inputs_of_a_users_island_are_widened() -> None:
    """``autocast(enabled=False)`` alone widens nothing: its product of half and FP32 would raise."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = original(
        net(lambda self, x: self.second(self.first(x)) * 2.0, first=first, second=second),
        {"x": torch.randn(8, 4)},
    )
    module = runnable(model.program)
    for node in module.graph.nodes:
        if node.name in ("linear_1", "mul"):
            node.meta["custom"] = {"halfeven_island": "autocast(enabled=False)"}
    half = rewrite(model.program, make_plan(module, Precision("O3")), model.spec, model.example, module)
    assert [dtype_of(node) for node in calls(half.program, "linear.default")] == [torch.half, torch.float32]
    x = torch.randn(3, 4)
    with torch.inference_mode():
        hidden = F.linear(x.half(), first.weight.half(), first.bias.half()).float()
        assert torch.equal(run(half.program, x)[0], second(hidden) * 2.0)


def test_there_and_back_is_not_cast_at_all() -> None:
    """A half tensor that the user widens and a product reads in half again."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = original(
        net(lambda self, x: self.second(self.first(x).to(torch.float16).float()), first=first, second=second),
        {"x": torch.randn(8, 4)},
    )
    half = half_of(model, Precision())
    assert len(casts(half.program)) == 3, "the input, the user's own, the output"
    x = torch.randn(3, 4)
    assert torch.equal(run(half.program, x)[0], live(model.program, torch.half, x)[0].float())


def test_a_prepared_original_is_left_as_it_is() -> None:
    model = captured_net("tied")
    module = runnable(model.program)
    before, weights = str(module.graph), {n: t.dtype for n, t in module.state_dict().items()}
    rewrite(model.program, make_plan(module, Precision()), model.spec, model.example, module)
    assert (str(module.graph), {n: t.dtype for n, t in module.state_dict().items()}) == (before, weights)


def test_a_tensor_whose_size_its_values_decide_runs_in_half_too() -> None:
    """x[mask]: a graph network leaves out the edges from a node to itself."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x * self.get_submodule("layer")(x[x[:, 0] > 0]).mean()

    x = torch.randn(8, 16)
    model = original(net(forward, layer=nn.Linear(16, 4)), {"x": x})
    half = half_of(model, Precision("O1", "fp16"))
    assert half.half_nodes > 0
    torch.testing.assert_close(
        run(half.program, x)[0].float(), run(model.program, x)[0], rtol=1e-2, atol=1e-2
    )
