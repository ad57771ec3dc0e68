"""Regions and control flow in captured programs: islands are written down, halves are not, bodies are checked."""

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.capture.autocast import original_in_fp32, see_transformers
from halfeven.models.capture.capture import normalise
from halfeven.models.capture.regions import ISLAND
from halfeven.models.errors import CaptureFailed, DamagedFile
from halfeven.models.program import runnable, walk
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import Original, original

Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """A Linear(4, 4) and a forward of the test's."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def captured(forward: Forward, *shape: int) -> Original:
    return original(Net(forward), {"x": torch.randn(8, *(shape or (4,)))})


def nodes(program: ExportedProgram) -> dict[str, torch.fx.Node]:
    return {name: node for name, node in walk(program.graph_module) if node.op == "call_function"}


def islands(program: ExportedProgram) -> dict[str, str]:
    """Op → why its node is an island, for those that are."""
    return {
        str(node.target).removeprefix("aten."): node.meta["custom"][ISLAND]
        for node in nodes(program).values()
        if ISLAND in node.meta.get("custom", {})
    }


def answers_as_the_module(came: Original, forward_of: nn.Module, *shape: int) -> None:
    for rows in (1, 2, 5):
        x = torch.randn(rows, *(shape or (4,)))
        with torch.inference_mode():
            expected = forward_of(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.testing.assert_close(came.run(x), expected)


def through_an_archive(came: Original, path: Path, **how: Any) -> Original:
    save_program(came.program, path, weights=True)
    return Original(load_program(path), came.spec, came.example)


def softmax_in_fp32(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        y = torch.softmax(y.float(), -1) * 2
    return net.linear(y)


def test_a_region_without_autocast_is_an_island_and_its_neighbours_are_not(tmp_path: Path) -> None:
    net = Net(softmax_in_fp32)
    came = original(net, {"x": torch.randn(8, 4)})
    why = {"to.dtype": "autocast(enabled=False)", "softmax.int": "autocast(enabled=False)"}
    assert islands(came.program) == {**why, "mul.Tensor": "autocast(enabled=False)"}
    assert sum("linear" in name for name in nodes(came.program)) == 2
    answers_as_the_module(came, net)
    loaded = through_an_archive(came, tmp_path / "program.pt2")
    assert islands(loaded.program) == islands(came.program)
    answers_as_the_module(loaded, net)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_region_that_asks_for_half_leaves_no_cast_in_the_original_but_a_note(device: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            y = net.linear(x)
            with torch.autocast(device, enabled=False):
                y = y.float().exp()
            return net.linear(y)

    with original_in_fp32() as notes:
        came = captured(forward)
    assert {node.meta["val"].dtype for node in nodes(came.program).values()} == {torch.float32}
    assert set(islands(came.program)) == {"to.dtype", "exp.default"}
    came.run(torch.randn(3, 4))
    assert not notes  # the inner one heard it
    with original_in_fp32() as notes, torch.no_grad():
        Net(forward)(torch.randn(2, 4))
    assert [note for note in notes if f"torch.autocast on {device}" in note]


def test_autocast_is_torchs_own_again_after_a_capture() -> None:
    before = (torch.autocast.__enter__, torch.amp.custom_fwd, torch.cuda.amp.custom_fwd)
    with original_in_fp32():
        assert torch.autocast.__enter__ is not before[0] and torch.amp.custom_fwd is not before[1]
    assert (torch.autocast.__enter__, torch.amp.custom_fwd, torch.cuda.amp.custom_fwd) == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_transformers_is_as_before_after_a_capture_and_a_blocked_import_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generic, theirs = ModuleType("transformers.utils.generic"), object()
    vars(generic)["maybe_autocast"] = theirs
    monkeypatch.setitem(sys.modules, generic.__name__, generic)
    monkeypatch.setitem(sys.modules, "blocked", None)
    with see_transformers():
        assert vars(generic)["maybe_autocast"] is not theirs
    assert vars(generic)["maybe_autocast"] is theirs


def test_gradient_regions_are_taken_in_whatever_they_are_nested_in() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y = net.linear(x)
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                z = y.exp()
        with torch.inference_mode():
            return y, z + 1

    net = Net(forward)
    came = original(net, {"x": torch.randn(8, 4)})
    assert islands(came.program) == {"exp.default": "autocast(enabled=False)"}
    assert not list(came.program.graph_module.children())
    answers_as_the_module(came, net)


def test_a_decorated_method_is_an_island_too() -> None:
    class Norm(nn.Module):
        @torch.autocast("cuda", enabled=False)
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    came = original(nn.Sequential(nn.Linear(4, 4), Norm()), {"input": torch.randn(8, 4)})
    assert set(islands(came.program)) == {"mul.Tensor", "rsqrt.default", "mean.dim", "add.Tensor"}


def custom(cast_inputs: torch.dtype | None) -> Forward:
    """A custom autograd function, decorated while a capture runs as in a user's file."""

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.save_for_backward(x)
            return (x * x).sum(-1) * scale

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0].unsqueeze(-1) * ctx.saved_tensors[0], None

    return lambda net, x: Function.apply(net.linear(x), 0.5)


def test_a_custom_function_with_fp32_inputs_is_an_island() -> None:
    with original_in_fp32():
        net = Net(custom(torch.float32))
    came = original(net, {"x": torch.randn(8, 4)})
    why = "custom_fwd(cast_inputs=float32)"
    assert islands(came.program) == dict.fromkeys(("to.dtype", "mul.Tensor", "sum.dim_IntList"), why)
    answers_as_the_module(came, net)


@pytest.mark.parametrize("cast_inputs", [None, torch.float16])
def test_a_custom_function_without_is_none(cast_inputs: torch.dtype | None) -> None:
    with original_in_fp32() as notes:
        net = Net(custom(cast_inputs))
        came = original(net, {"x": torch.randn(8, 4)})
    assert islands(came.program) == {}
    assert len(notes) == (cast_inputs is not None)
    answers_as_the_module(came, net)


def branches(net: Net, x: Tensor) -> Tensor:
    def positive(y: Tensor) -> Tensor:
        return net.linear(y).sin()

    def negative(y: Tensor) -> Tensor:
        return torch.cond(y.sum() > -3, lambda z: z + 1, lambda z: net.linear(z) * 2, (y.cos(),))

    return torch.cond(x.sum() > 0, positive, negative, (x,))


def loop(net: Net, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, net.linear(y)), (start, x))[1]


def recurrence(net: Net, x: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(net.linear(state) + row)
        return state, state.clone()

    return scan(step, x.new_zeros(x.shape[0], 4), x, dim=1)[1]


def each_row(net: Net, x: Tensor) -> Tensor:
    return map_rows(lambda row, *_: net.linear(row).sin(), x)


FLOWS: dict[str, tuple[Forward, tuple[int, ...]]] = {
    "cond": (branches, (4,)),
    "while_loop": (loop, (4,)),
    "scan": (recurrence, (5, 4)),
    "map_impl": (each_row, (4,)),
}


@pytest.fixture(scope="module")
def flows() -> dict[str, tuple[Net, Original]]:
    nets = {name: Net(forward) for name, (forward, _) in FLOWS.items()}
    return {
        name: (nets[name], original(nets[name], {"x": torch.randn(8, *FLOWS[name][1])})) for name in FLOWS
    }


@pytest.mark.slow
@pytest.mark.parametrize("flow", FLOWS)
def test_control_flow_is_captured_saved_loaded_and_run(
    flow: str, flows: dict[str, tuple[Net, Original]], tmp_path: Path
) -> None:
    net, came = flows[flow]
    assert any(str(node.target) == flow for node in nodes(came.program).values())
    answers_as_the_module(came, net, *FLOWS[flow][1])
    answers_as_the_module(through_an_archive(came, tmp_path / "program.pt2"), net, *FLOWS[flow][1])


@pytest.mark.slow
def test_nothing_in_a_body_pins_a_dtype_and_dropout_there_is_left_out_of_what_runs() -> None:
    drop = nn.Dropout(0.5).eval()

    def forward(net: Net, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: drop(net.linear(y).float()), lambda y: y.float().cos(), (x,))

    came = captured(forward)
    ops = {str(node.target) for node in nodes(came.program).values()}
    assert "aten.dropout.default" in ops and "aten._assert_tensor_metadata.default" not in ops
    left = {str(node.target) for _, node in walk(runnable(came.program))}
    assert "aten.dropout.default" not in left and "aten.linear.default" in left


class OtherLayouts(TorchDispatchMode):
    """A device whose kernels give every result with its axes the other way round in memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or any(one.alias_info for one in func._schema.returns):
            return result
        axes = tuple(reversed(range(result.dim())))
        return result.permute(axes).contiguous().permute(axes)


@pytest.mark.slow
def test_no_node_needs_the_memory_layout_that_the_capturing_devices_kernels_gave() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 2, 2)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.patches(x)
            tokens = seen.view(seen.shape[0], 16, -1).transpose(1, 2)
            return self.layer(tokens).view(-1, 16)

    net = Viewing().eval()
    came, x = original(net, {"x": torch.randn(3, 3, 4, 4)}), torch.randn(2, 3, 4, 4)
    (plain,) = came.run(x)
    with OtherLayouts():
        (other,) = came.run(x)
    torch.testing.assert_close(other, plain)
    branches = captured(
        lambda _, x: torch.cond(x.sum() > 0, lambda y: y.sin().view(-1), lambda y: y.view(-1).cos(), (x,))
    )
    assert "aten.view.default" not in {str(node.target) for _, node in walk(branches.program.graph_module)}


@pytest.mark.slow
def test_an_island_reaches_into_control_flow_and_out_of_it(tmp_path: Path) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            with torch.autocast("cuda", enabled=False):
                return y.exp()

        with torch.autocast("cpu", enabled=False):
            x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        return torch.cond(x.sum() > 0, inside, lambda y: net.linear(y), (x,))

    net = Net(forward)
    came = through_an_archive(original(net, {"x": torch.randn(8, 4)}), tmp_path / "program.pt2")
    assert {"sin.default", "cos.default", "exp.default"} <= set(islands(came.program))
    assert "linear.default" not in islands(came.program)
    answers_as_the_module(came, net)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CUDA is not available")  # torch's compiler builds the region itself
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_region_that_asks_for_half_inside_control_flow_leaves_no_cast_either(device: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return net.linear(y).float()

        return torch.cond(x.sum() > 0, inside, lambda y: y.cos(), (x,))

    net = Net(forward)
    came = original(net, {"x": torch.randn(8, 4)})
    assert {node.meta["val"].dtype for node in nodes(came.program).values() if "linear" in node.name} == {
        torch.float32
    }
    x = torch.randn(5, 4).abs()
    torch.testing.assert_close(came.run(x)[0], net.linear(x))


def test_any_other_construct_with_a_body_is_refused_with_its_name_and_line() -> None:
    program = captured(softmax_in_fp32).program
    node = next(node for node in program.graph.nodes if str(node.target) == "aten.linear.default")
    node.target = torch.ops.higher_order.associative_scan
    with pytest.raises(CaptureFailed) as caught:
        normalise(program)
    line = Path(__file__).read_text().splitlines().index("        return self.body(self, x)") + 1
    assert f"'associative_scan' ('linear') at {__file__}:{line} (`return self.body" in str(caught.value)
    assert 'form = "live"' in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("flow", FLOWS)
def test_a_body_is_held_against_the_same_lists_as_the_main_graph(
    flow: str, flows: dict[str, tuple[Net, Original]], tmp_path: Path
) -> None:
    """Every op in every body, one at a time, becomes one that loading could execute."""
    save_program(flows[flow][1].program, tmp_path / "good.pt2", weights=True)
    with zipfile.ZipFile(tmp_path / "good.pt2") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    text = members["archive/models/model.json"].decode()
    calls = _body_calls(json.loads(text)["graph_module"]["graph"])
    assert calls
    for index in range(len(calls)):
        document = json.loads(text)
        _body_calls(document["graph_module"]["graph"])[index]["target"] = "torch.hub.load"
        path = tmp_path / "crafted.pt2"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, json.dumps(document) if name == "archive/models/model.json" else data)
        with pytest.raises(DamagedFile, match=r"target = 'torch.hub.load'"):
            load_program(path)


def _body_calls(graph: Any) -> list[dict[str, Any]]:
    """The nodes of every graph that stands in an argument, however deep."""
    found: list[dict[str, Any]] = []
    for node in graph["nodes"]:
        for argument in node["inputs"]:
            body = argument["arg"].get("as_graph")
            if body:
                found += body["graph"]["nodes"] + _body_calls(body["graph"])
    return found
