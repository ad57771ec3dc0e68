"""A module that is alive in this process is captured here, and is afterwards as it was."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.guessing.bare import guessed_folder
from halfeven.exporters.guessing.module_source import guess_module
from halfeven.models.capture.capture import Captured, capture
from halfeven.models.errors import BadSamples, CaptureFailed
from halfeven.models.program import runnable
from torch import nn
from torch.nn.utils import weight_norm


def captured(module: nn.Module, folder: Path, samples: Mapping[str, np.ndarray]) -> Captured:
    (folder / "module.py").write_text("")
    guess = guess_module(folder, "module.py:build", "net", samples, module=module)
    assert guess.samples is not None
    return capture(replace(guessed_folder(guess, folder), module=module), guess.samples)


def drawn(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.random.normal(size=shape).astype(np.float32)}


class Counting(nn.Module):
    """A net whose forward writes into a buffer, keeps a tensor of the last call, and draws no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.last = self.linear(torch.ones(4))  # with a gradient's history

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)) + self.last.detach()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.slow
def test_the_module_and_torchs_settings_are_as_before(tmp_path: Path) -> None:
    net = Counting().train()
    net.linear.bias.requires_grad_(False)
    before, forward, parameters = (
        state_of(net),
        net.forward,
        [(p, p.requires_grad, p.data_ptr()) for p in net.parameters()],
    )
    causal = nn.modules.transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(True)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    captured(net, tmp_path, drawn(8, 4))
    assert torch.equal(torch.rand(2), expected)
    assert (
        torch.backends.mha.get_fastpath_enabled() and nn.modules.transformer._detect_is_causal_mask is causal
    )
    assert (
        net.training and net.norm.training and net.forward == forward and "frozen_when_built" not in vars(net)
    )
    assert [(p, p.requires_grad, p.data_ptr()) for p in net.parameters()] == parameters
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(net).items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


NETS = {
    "in training mode": lambda: Counting().train(),
    "with tied weights": Tied,
    "in half": lambda: nn.Sequential(nn.Linear(4, 3)).half(),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(4, 3))),
    "with a weight that a hook makes": lambda: weight_norm(nn.Linear(4, 3)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", NETS)
def test_the_program_answers_as_the_module_in_evaluation(name: str, tmp_path: Path) -> None:
    net, given = NETS[name](), drawn(6, 4)
    program = captured(net, tmp_path, given).program
    x = torch.from_numpy(given["x"])
    answers = runnable(program)(x)
    with torch.no_grad():
        wanted = net.float().eval()(x)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for answer, right in zip(answers, wanted, strict=True):
        torch.testing.assert_close(answer, right)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x  # the line that the message quotes


def test_a_module_that_cannot_be_captured_is_refused_with_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureFailed, match="module Branching cannot be captured") as refused:
        captured(Branching(), tmp_path, drawn(6, 4))
    said = str(refused.value)
    assert "a decision that depends on a tensor's values at" in said
    assert "test_own_module.py" in said.partition("\n")[0]


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw(x)


@pytest.mark.parametrize(
    "draw",
    [torch.randn_like, torch.bernoulli, lambda x: torch.nn.functional.dropout(x, 0.5, training=True)],
    ids=["randn_like", "bernoulli", "dropout"],
)
def test_a_node_that_draws_random_numbers_is_named_with_its_line(
    draw: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    samples = {"x": np.random.uniform(0.2, 0.8, (6, 64)).astype(np.float32)}
    words = r"random numbers are drawn by node '.+' at .*test_own_module.py:.*: make what is drawn an input, or draw"
    with pytest.raises(CaptureFailed, match=words):
        captured(Noisy(draw), tmp_path, samples)


@pytest.mark.parametrize("net", [nn.Linear(4, 3), nn.Conv1d(4, 3, 1)], ids=str)
def test_what_is_computed_in_double_beside_fp32_weights_is_named(net: nn.Module, tmp_path: Path) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x.double())

    with pytest.raises(CaptureFailed, match=r"a float64 input or number beside FP32 weights"):
        captured(Doubling(), tmp_path, drawn(8, 4, 5) if isinstance(net, nn.Conv1d) else drawn(8, 4))


@pytest.mark.parametrize(
    ("around", "words"), [(nn.Module.eval, "it is a"), (nn.Sequential, "the module's part '0' is a")]
)
def test_a_script_is_refused_by_its_name(
    around: Callable[[nn.Module], nn.Module], words: str, tmp_path: Path
) -> None:
    script = torch.jit.trace(nn.Linear(4, 3), torch.ones(1, 4))
    assert isinstance(script, nn.Module)
    with pytest.raises(CaptureFailed, match=f"{words} TorchScript module") as refused:
        captured(around(script), tmp_path, drawn(6, 4))
    assert "Traceback" not in str(refused.value)


def test_a_module_that_raises_is_refused_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureFailed, match="mat1 and mat2"):
        captured(nn.Linear(5, 3), tmp_path, drawn(6, 4))


def doubled(module: nn.Module, given: Any, answer: torch.Tensor) -> torch.Tensor:
    return answer * 2


def test_hooks_of_the_module_see_what_its_own_forward_takes_and_gives(tmp_path: Path) -> None:
    """They were given the flat tuple of outputs: one that computes with the answer made two outputs of one."""
    net, inputs = nn.Linear(4, 3), drawn(8, 4)
    net.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    net.register_forward_pre_hook(lambda _, given, named: (given, named), with_kwargs=True)
    net.register_forward_hook(doubled)
    net.register_forward_hook(lambda _, given, named, answer: None, with_kwargs=True)
    x = torch.from_numpy(inputs["x"])
    expected = net(x)
    (answer,) = runnable(captured(net, tmp_path, inputs).program)(x)
    assert torch.allclose(answer, expected, atol=1e-6)
    assert torch.equal(net(x), expected), "the module has its hooks as before"


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class Answering(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        found = super().forward(input)
        return Answer(found, (input * 2.0,))


def test_the_fields_of_a_dataclass_are_outputs(tmp_path: Path) -> None:
    made = captured(Answering(4, 3), tmp_path, drawn(8, 4))
    assert [tensor.name for tensor in made.spec.outputs] == ["logits", "hidden.0"]


class Selecting(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)[input[:, 0] > 0]


def test_a_number_of_rows_that_two_runs_have_in_common_by_chance_is_free(tmp_path: Path) -> None:
    samples = drawn(8, 4)
    samples["x"][:, 0] = [1, -1, -1, -1, 1, -1, 1, 1]
    output = captured(Selecting(4, 3), tmp_path, samples).spec.outputs[0]
    assert [dim.fixed for dim in output.shape] == [False, True]


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("weights", [torch.float16, torch.float32])
def test_samples_in_another_floating_type_than_the_original_s_are_converted(
    weights: torch.dtype, given: type, tmp_path: Path
) -> None:
    samples = {"x": np.random.normal(size=(16, 4)).astype(given)}
    found = captured(nn.Linear(4, 3).to(weights), tmp_path, samples)
    assert found.spec.inputs[0].datatype == "FP32"


def test_a_sample_in_fp64_beyond_fp32_is_named(tmp_path: Path) -> None:
    samples = {"x": np.random.normal(size=(16, 4))}
    samples["x"][5, 1] = 1e39
    with pytest.raises(BadSamples, match=r"tensor 'x': the sample 5 has 1e\+39"):
        captured(nn.Linear(4, 3), tmp_path, samples)


class Keeping(nn.Module):
    """A net that makes a table at its first call, and another where an input is longer."""

    table: torch.Tensor | None

    def __init__(self, into: str) -> None:
        super().__init__()
        self.linear, self.into = nn.Linear(4, 4), into
        self.kept: dict[str, torch.Tensor] = {}
        if into == "attribute":
            self.table = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.into == "dictionary":
            if "table" not in self.kept:
                self.kept["table"] = torch.arange(4).cos()
            return self.linear(x) * self.kept["table"]
        if self.into == "buffer" and not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(4).cos())
        if self.into != "buffer" and (getattr(self, "table", None) is None or len(self.table) < x.shape[1]):  # type: ignore[arg-type]
            self.table = torch.arange(x.shape[1]).cos()
        return self.linear(x) * self.table


@pytest.mark.parametrize("into", ["attribute", "new attribute", "buffer", "dictionary"])
def test_a_table_that_forward_makes_at_its_first_call_is_in_the_program(into: str, tmp_path: Path) -> None:
    net = Keeping(into)
    found = captured(net, tmp_path, drawn(16, 4))
    x = torch.randn(3, 4)
    with torch.inference_mode():
        (answer,) = runnable(found.program)(x)
        torch.testing.assert_close(answer, net(x))


@pytest.mark.parametrize("answer", [lambda y: {"a.0": y, "a": [2 * y]}, lambda y: {1: y, "1": 2 * y}])
def test_two_outputs_of_one_name_are_refused(answer: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return answer(x)

    with pytest.raises(CaptureFailed, match=r"forward gives 2 outputs with the name '(a.0|1)'"):
        captured(Net(), tmp_path, drawn(8, 4))
