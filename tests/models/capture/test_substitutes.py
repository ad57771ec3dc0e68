"""Operators that no archive may hold are captured as others, with the same answers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from halfeven.exporters.torch.autocast.plan import make_plan
from halfeven.exporters.torch.autocast.rewrite import rewrite
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.capture.substitutes import substitute
from halfeven.models.folder.package import Precision
from halfeven.models.program import runnable
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.corpus.case import net
from tests.programs import original

Forward = Callable[[Tensor], Tensor]


def filled(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 4)
    out[:, :2], out[:, 2:] = x[:, 2:], x[:, :2]
    return out


def filled_like(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x.sin())


def filled_new(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 2)).fill_(2.0) * x[:, :2]


def windows(x: Tensor) -> Tensor:
    """Overlapping windows of a row: what sliding attention does."""
    return torch.as_strided(x.relu(), (x.shape[0], 3, 2), (4, 1, 1)).sum(-1)


def scaled(x: Tensor) -> Tensor:
    """A constant that is made in forward, as kornia's colour spaces have theirs."""
    return x * torch.tensor([0.95, 1.0, 1.09, 2.0], dtype=x.dtype)


def made(forward: Forward) -> nn.Module:
    return net(lambda self, x: forward(x))


@pytest.mark.parametrize("forward", [filled, filled_like, filled_new, windows])
def test_what_reads_memory_as_it_was_found_is_captured_with_zeros_or_a_copy(
    forward: Forward, tmp_path: Path
) -> None:
    x = torch.randn(5, 4)
    captured = original(made(forward), {"x": x})
    save_program(captured.program, tmp_path / "program.pt2", weights=True)
    (came,) = runnable(load_program(tmp_path / "program.pt2"))(x)
    assert torch.equal(came, forward(x))


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_a_constant_that_forward_makes_may_be_half_after_it_was_read_from_an_archive(
    level: str, tmp_path: Path
) -> None:
    x = torch.randn(5, 4)
    captured = original(made(scaled), {"x": x})
    save_program(captured.program, tmp_path / "program.pt2", weights=True)
    program = load_program(tmp_path / "program.pt2")
    plan = make_plan(runnable(program), Precision(level))
    half = rewrite(program, plan, captured.spec, captured.example)
    (came,) = runnable(half.program)(x)
    # Input, constant and product are each rounded to half, whose smallest number is 2^-24.
    torch.testing.assert_close(came, scaled(x), rtol=2**-9, atol=2**-23)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.slow
def test_a_batch_norm_that_was_taken_apart_gets_its_checks_back(tmp_path: Path) -> None:
    module, x = Normed().eval(), torch.randn(5, 4)
    program: ExportedProgram = torch.export.export(module, (x,)).run_decompositions()
    kernel = torch.ops.aten._native_batch_norm_legit_no_training.default
    assert any(node.target is kernel for node in program.graph.nodes)
    substitute(program)
    save_program(program, tmp_path / "program.pt2", weights=True)
    loaded = load_program(tmp_path / "program.pt2")
    assert [n.target for n in loaded.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.batch_norm.default
    ]
    (came,) = runnable(loaded)(x)
    assert torch.equal(came, module(x))
