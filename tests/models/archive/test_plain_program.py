"""The program that a server reads of an archive: the same graph and bits as torch's own reader gives, without that
reader."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.archive.plain_program import read_module
from halfeven.models.errors import DamagedFile
from halfeven.models.program import Look, look_of, runnable
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests import control_flow
from tests.models.archive.crafting import MODEL, WEIGHTS, crafted
from tests.nets import NETS, captured_net
from tests.patience import PATIENCE_S
from tests.programs import original
from tests.slow import slow_but


def graph_of(module: GraphModule) -> list[tuple[str, str, str, object]]:
    """Every op with its arguments and what it gives, weights by their values, whatever things are called."""
    places: dict[Node, int] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, Node) and value.op == "get_attr":
            held = module
            for word in str(value.target).split("."):
                held = getattr(held, word)
            assert isinstance(held, Tensor)
            return f"{held.dtype} {list(held.shape)} {held.double().sum():.17g}"
        if isinstance(value, Node):
            return places[value]
        if isinstance(value, (list, tuple)):
            return [argument(one) for one in value]
        return repr(value)

    listed: list[tuple[str, str, str, object]] = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        places[node] = len(listed)
        args = [] if node.op == "placeholder" else argument(node.args)
        named = {name: argument(value) for name, value in node.kwargs.items()}
        look = look_of(node) if node.op != "output" else None
        kind = str(node.target) if node.op == "call_function" else node.op
        listed.append((kind, str(args), str(named), look and (look.dtype, len(look.shape))))
    return listed


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.parametrize("weights", slow_but({True}, [True, False]))
def test_the_graph_and_the_bits_are_those_of_torchs_reader(name: str, weights: bool, tmp_path: Path) -> None:
    net = NETS[name]
    captured = captured_net(name)
    path = tmp_path / "net.pt2"
    save_program(captured.program, path, weights=weights)
    state = None if weights else dict(captured.program.state_dict)
    found, expected = read_module(path, state), runnable(load_program(path, state))
    assert found is not None, "a straight list of operations"
    assert graph_of(found) == graph_of(expected)
    for rows in (1, 5):
        inputs = list(net.inputs(rows).values())
        with torch.inference_mode():
            for one, other in zip(found(*inputs), expected(*inputs), strict=True):
                assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


class Split(nn.Module):
    """Ops with several results and with lists of them, one of which nobody reads; scalars, a dtype, a device."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, _, last = torch.split(x, 2, dim=1)
        largest, index = x.max(dim=1)
        places = torch.arange(x.shape[0] * 2, device=x.device, dtype=torch.float64)
        held = torch.where(x > 0, float("inf"), x).to(torch.float16)
        return first + last, largest, index, places[: x.shape[0]], held, torch.full_like(x, -float("inf"))


def test_several_results_and_scalars_of_every_kind(tmp_path: Path) -> None:
    captured = original(Split(), {"x": torch.randn(8, 6)})
    save_program(captured.program, tmp_path / "net.pt2", weights=True)
    found = read_module(tmp_path / "net.pt2")
    assert found is not None
    x = torch.randn(3, 6)
    for one, other in zip(found(x), captured.run(x), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_equal_free_sizes_look_equal_and_others_do_not(tmp_path: Path) -> None:
    captured = original(Split(), {"x": torch.randn(8, 6)})
    save_program(captured.program, tmp_path / "net.pt2", weights=True)
    found = read_module(tmp_path / "net.pt2")
    assert found is not None
    looks = {node.name: look_of(node) for node in found.graph.nodes}
    x, positive, places = (looks[name] for name in ("tensors_0", "gt", "arange"))
    assert x is not None and positive == Look(torch.bool, x.shape)
    assert places is not None and places.shape[0] != x.shape[0] and places.dtype == torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("kind", [control_flow.Branches, control_flow.Loop])
def test_control_flow_is_left_to_torch(kind: type[nn.Module], tmp_path: Path) -> None:
    captured = original(kind(), {"x": torch.randn(8, 4)})
    save_program(captured.program, tmp_path / "net.pt2", weights=True)
    assert read_module(tmp_path / "net.pt2") is None


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    captured = original(nn.Sequential(nn.Linear(4, 3)), {"input": torch.randn(8, 4)})
    save_program(captured.program, tmp_path / "linear.pt2", weights=False)
    return tmp_path / "linear.pt2"


@pytest.mark.parametrize(
    ("state", "came"),
    [
        ({}, "no such tensor"),
        ({"0.weight": torch.zeros(3, 5), "0.bias": torch.zeros(3)}, r"float32 \[3, 5\]"),
        ({"0.weight": torch.zeros(3, 4).half(), "0.bias": torch.zeros(3)}, "float16"),
    ],
)
def test_wrong_weights_are_named(linear: Path, state: dict[str, Tensor], came: str) -> None:
    with pytest.raises(DamagedFile, match=rf"'0\..*must be.*{came}"):
        read_module(linear, state)


def test_what_the_check_refuses_is_refused_here_too(linear: Path) -> None:
    def harmful(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"

    with pytest.raises(DamagedFile, match="could execute"):
        read_module(crafted(linear, linear.with_name("other.pt2"), MODEL, harmful), {})


@pytest.mark.parametrize("target", ["torch.sym_max", "_operator.abs", "math.floor"])
def test_what_is_not_known_is_left_to_torch(linear: Path, target: str) -> None:
    def changed(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][-1]["target"] = target

    state = {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)}
    assert read_module(crafted(linear, linear.with_name("other.pt2"), MODEL, changed), state) is None


@pytest.mark.parametrize("key", ["storage_offset", "sizes"])
def test_a_weight_that_lies_outside_of_its_bytes_is_never_read(key: str, tmp_path: Path) -> None:
    captured = original(nn.Sequential(nn.Linear(4, 3)), {"input": torch.randn(8, 4)})
    save_program(captured.program, tmp_path / "linear.pt2", weights=True)

    def moved(document: Any) -> None:
        meta = document["config"]["0.weight"]["tensor_meta"]
        meta[key] = {"as_int": 1 << 20} if key == "storage_offset" else [{"as_int": 3}, {"as_int": 1 << 20}]

    other = crafted(tmp_path / "linear.pt2", tmp_path / "other.pt2", WEIGHTS, moved)
    assert read_module(other) is None
    with pytest.raises(DamagedFile, match="cannot be loaded"):
        load_program(other)


def test_another_version_of_the_format_is_left_to_torch(linear: Path) -> None:
    def changed(document: Any) -> None:
        document["schema_version"]["major"] = 9

    state = {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)}
    assert read_module(crafted(linear, linear.with_name("other.pt2"), MODEL, changed), state) is None


@pytest.mark.slow
def test_a_program_is_read_without_torchs_reader_and_what_that_brings(linear: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from halfeven.models.archive.plain_program import read_module;"
        "from halfeven.models.engines.torch_engine import TorchEngine;"
        f"module = read_module(Path({str(linear)!r}), {{'0.weight': torch.ones(3, 4), '0.bias': torch.ones(3)}});"
        "TorchEngine(module, 'fp32', torch.device('cpu')); print('sympy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == "False"
