"""A program that is made ready to run may be changed: the program that it was made of stays as it was."""

import io

import pytest
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.program import on_device, runnable, walk
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from tests.corpus import captured, fresh
from tests.corpus.case import linear, net
from tests.programs import original


def written(program: ExportedProgram) -> list[str]:
    """Every node of every body, and whether torch's verifier would find what it looks for."""
    return [f"{name}{node.format_node()} {'val' in node.meta}" for name, node in walk(program.graph_module)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branch by length", "branch by value", "while loop", "scan", "zoo switch"])
def test_an_engine_changes_nothing_of_the_program_that_it_runs(name: str) -> None:
    program = captured(name).program
    before = written(program)
    engine = TorchEngine(program, "fp32", torch.device("cpu"))
    engine.close()
    assert written(program) == before
    torch.export.save(program, io.BytesIO())


@pytest.mark.parametrize("name", ["branch by length", "while loop", "scan"])
def test_bodies_of_its_own_answer_as_the_programs_do(name: str) -> None:
    made = captured(name)
    inputs = fresh(name, 4, seed=3)
    tensors = [inputs[tensor.name] for tensor in made.spec.inputs]
    module = runnable(made.program)
    with torch.inference_mode():
        expected, got = made.program.module(check_guards=False)(*tensors), module(*tensors)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    bodies = [body for body in module.modules() if isinstance(body, GraphModule)]
    theirs = {id(body) for body in made.program.graph_module.modules()}
    assert len(bodies) > 1 and not any(id(body) in theirs for body in bodies)


@pytest.mark.slow
def test_what_forward_computes_for_nobody_is_left_out_and_what_it_writes_is_not() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        unread = torch.softmax(self.get_submodule("last")(x).tanh(), -1)
        unread = torch.cond(x.sum() > 0, lambda v: v + 1.0, lambda v: v * 2.0, (unread,))
        found = x * 2.0
        found[:, :2] = 1.0
        return found

    program = original(net(forward, last=linear(4, 4)), {"x": torch.randn(8, 4)}).program
    module, x = runnable(program), torch.randn(3, 4)
    kept = {getattr(node.target, "__name__", "").partition(".")[0] for _, node in walk(module)}
    assert any(op.endswith("_") for op in kept) and not kept & {"linear", "tanh", "softmax", "cond"}, kept
    expected = x * 2
    expected[:, :2] = 1.0
    assert torch.equal(module(x)[0], expected)


class Tied(nn.Module):
    """Two names of one weight, a constant tensor and a branch: all that a program keeps on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x))) + self.shift + torch.ones(4, device=x.device)
        return torch.cond(y.sum() > 0, lambda v: v + torch.zeros(4, device=v.device), lambda v: v * 2, (y,))


def devices(program: ExportedProgram) -> set[str]:
    """The devices of a program's weights and constants."""
    held = [*program.state_dict.values(), *program.constants.values()]
    return {str(tensor.device) for tensor in held if isinstance(tensor, Tensor)}


def test_a_program_moved_to_a_device_leaves_the_program_that_came_where_it_is() -> None:
    x = torch.randn(3, 4)
    came = torch.export.export(Tied().eval().requires_grad_(False), (x,))
    expected, written = came.module()(x), str(came.graph_module.code)
    moved = on_device(came, "meta")
    assert (devices(moved), devices(came)) == ({"meta"}, {"cpu"})
    assert str(came.graph_module.code) == written
    assert torch.equal(came.module()(x), expected)


def test_names_of_one_weight_are_one_weight_on_the_device_too() -> None:
    came = torch.export.export(Tied().eval().requires_grad_(False), (torch.randn(3, 4),))
    assert came.state_dict["first.weight"] is came.state_dict["second.weight"], (
        "what is claimed has a subject"
    )
    moved = on_device(came, "meta")
    assert moved.state_dict["first.weight"] is moved.state_dict["second.weight"]


@pytest.mark.slow
def test_a_weight_that_is_on_the_device_already_is_not_copied() -> None:
    came = torch.export.export(Tied().eval().requires_grad_(False), (torch.randn(3, 4),))
    moved = on_device(came, "cpu")
    weight = came.state_dict["first.weight"]
    assert moved.state_dict["first.weight"].data_ptr() == weight.data_ptr()
