"""A module is called as its own code expects it: its names, its hooks, its None, what it writes into its inputs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.capture import agreement, child, describing, failures, sources
from halfeven.models.capture.child import Flat
from torch import Tensor, nn

ONE = {"inputs": [{"name": "x"}], "outputs": ["y"]}


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(2.0)
        return x + 1.0


def test_a_none_among_the_outputs_is_no_output() -> None:
    flat = Flat(nn.Identity(), {"inputs": [{"name": "input"}], "outputs": ["output0", "output2"]})
    first, last = torch.zeros(1), torch.ones(1)
    assert flat.in_order((first, None, last)) == (first, last)


def test_what_is_no_tensor_among_the_outputs_is_no_output_for_the_guess_and_for_the_capture() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + 1.0, 3, {"name": "net", "twice": x * 2.0}

    x = torch.randn(2, 4)
    assert describing.seen(torch, Counts(), {"x": x})[0]["left_out"] == {"1": "int", "2.name": "str"}
    found = describing._named(Counts(), {"x": x})
    flat = Flat(Counts(), {"inputs": [{"name": "x"}], "outputs": list(found)})
    for seen, captured in zip(found.values(), flat.forward(x), strict=True):
        assert torch.equal(seen, captured)


def test_a_forward_that_takes_a_dict_gets_the_advice_to_wrap_it_when_it_is_looked_at() -> None:
    class Takes(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["a"] + batch["b"]

    names, request = ["a", "b"], {"folder": "/", "path": [], "memory_limit_bytes": 0}
    with pytest.raises(TypeError) as caught:
        describing.seen(torch, Takes(), {name: torch.randn(4, 3) for name in names})
    sentence = failures.described(caught.value, request)["error"]
    assert (
        "a parameter for each" in sentence
        and "(batch: dict[str" in sentence
        and "'a' float32 [4, 3]" in sentence
    )


@pytest.mark.parametrize(
    ("forward", "by_name"),
    [
        (lambda x, y: x, True),
        (lambda *, x, y=None: x, True),
        (lambda **batch: batch, True),
        (lambda x, **more: x, True),
        (lambda a, **more: a, False),
        (lambda *rows, **more: rows, False),
        (lambda a, b: a, False),
    ],
)
def test_inputs_go_by_name_where_forward_takes_the_names(forward: Callable[..., Any], by_name: bool) -> None:
    assert child.takes_by_name(forward, ["x", "y"]) is by_name


def test_a_hook_of_the_module_sees_the_inputs_when_its_signature_is_looked_at() -> None:
    module = nn.Linear(4, 3)
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1.0,))
    x = torch.randn(2, 4)
    torch.testing.assert_close(describing._named(module, {"input": x})["output"], module(x))


def test_a_forward_that_writes_into_its_input_is_captured_and_leaves_the_callers_rows_alone() -> None:
    request = {**ONE, "inputs": [{"name": "x", "dims": [[1, 8], [4, 4]]}], "max_batch_size": 8}
    x = torch.randn(3, 4)
    right, given = Writes()(x.clone()), x.clone()
    flat = Flat(Writes(), request)
    program = child.export(torch, flat, [given], request)
    torch.testing.assert_close(program.module(check_guards=False)(given)[0], right)
    assert torch.equal(given, x)
    facts = agreement.check(torch, flat, program, [given], request)
    assert facts["max_batch_size"] == 8


def test_code_that_parses_a_command_line_on_import_finds_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["child.py", "request.json"])
    (tmp_path / "parses.py").write_text(
        "import argparse, torch\nargparse.ArgumentParser().parse_args()\n"
        "def build(): return torch.nn.Linear(4, 3 + len(argparse.ArgumentParser().parse_known_args()[1]))\n"
    )
    monkeypatch.delitem(sys.modules, "parses", raising=False)
    built = sources.python_module(torch, "parses.py:build", tmp_path)
    assert isinstance(built, nn.Linear) and built.out_features == 3
    assert sys.argv == ["child.py", "request.json"], "the process has its own command line again"
    monkeypatch.delitem(sys.modules, "parses")


def test_what_is_no_tensor_in_a_state_dict_is_not_widened() -> None:
    class Packed(nn.Linear):
        def get_extra_state(self) -> Any:
            return "qint8"

        def set_extra_state(self, state: Any) -> None:
            assert state == "qint8"

    module = Packed(4, 3).half()
    assert sources.widen(torch, module) == ["2 half-precision tensors of the module were widened to FP32"]
    assert module.weight.dtype == torch.float32
