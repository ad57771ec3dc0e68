"""What is made ready to run may be changed: the program that it was made of stays as it was."""

import io

import pytest
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.program import runnable, walk
from torch.export import ExportedProgram
from torch.fx import GraphModule

from tests.corpus import captured, fresh


def written(program: ExportedProgram) -> list[str]:
    """Every node of every body, and whether torch's verifier would find what it looks for."""
    return [f"{name}{node.format_node()} {'val' in node.meta}" for name, node in walk(program.graph_module)]


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
    whole = captured(name)
    inputs = fresh(name, 4, seed=3)
    tensors = [inputs[tensor.name] for tensor in whole.spec.inputs]
    module = runnable(whole.program)
    with torch.inference_mode():
        expected, got = whole.program.module(check_guards=False)(*tensors), module(*tensors)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    bodies = [body for body in module.modules() if isinstance(body, GraphModule)]
    theirs = {id(body) for body in whole.program.graph_module.modules()}
    assert len(bodies) > 1 and not any(id(body) in theirs for body in bodies)
