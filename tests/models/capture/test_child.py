"""A module whose state has the batch on axis 1: its captured program has it first, and answers as the module does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.capture.capture import capture
from halfeven.models.capture.child import Flat
from halfeven.models.errors import BadFolder, CaptureFailed
from halfeven.models.folder.package import read_folder
from halfeven.models.program import runnable
from halfeven.models.spec.spec import Dim

from tests.model_folders import samples_of, tensor
from tests.recurrent import GRU, HIDDEN, LAYERS, STEPS, WIDTH, recurrent_folder, requests, state


def captured(path: Path, code: str = GRU, **settings: Any) -> Any:
    samples = samples_of({"x": (STEPS, WIDTH), "h": (LAYERS, HIDDEN)})
    return capture(read_folder(recurrent_folder(path, code, **settings)), samples)


@pytest.mark.slow
def test_the_program_takes_and_gives_rows_and_answers_as_the_module(tmp_path: Path) -> None:
    found = captured(tmp_path / "gru")
    assert (found.spec.max_batch_size, found.notes) == (8, ())
    assert found.spec.inputs[1].shape == (Dim(), Dim(LAYERS, LAYERS), Dim(HIDDEN, HIDDEN))
    namespace: dict[str, Any] = {}
    exec(GRU, namespace)
    asked = {name: torch.from_numpy(array) for name, array in requests(6).items()}
    with torch.inference_mode():
        score, hidden = namespace["build"]().eval()(**asked)
        answers = runnable(found.program)(asked["x"], asked["h"].movedim(1, 0))
    torch.testing.assert_close(answers[0], score)
    torch.testing.assert_close(answers[1], hidden.movedim(1, 0))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an input without it": ({"inputs": [tensor("x", "FP32", [-1, STEPS, WIDTH]), state("h", -1, 0)]}, "'h' FP32"),
    "an output without it": ({"outputs": [tensor("y", "FP32", [-1, 3]), state("hn", -1, 0)]}, "set batch_axis"),
    "an output of fewer axes": (
        {"outputs": [tensor("y", "FP32", [3, 1, "1..9"], batch_axis=2), state("hn")]},
        "which has no axis 2: mend its batch_axis",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_batch_axis_that_is_not_the_module_s_is_refused_with_what_to_write(
    wrong: str, tmp_path: Path
) -> None:
    settings, words = WRONG[wrong]
    if wrong == "an input without it":
        settings = settings | {"samples": None}
    with pytest.raises((CaptureFailed, BadFolder)) as refused:
        captured(tmp_path / "gru", GRU, **settings)
    assert words in str(refused.value)


@pytest.mark.parametrize("by_name", [True, False])
def test_tensors_are_moved_by_name_and_in_order(by_name: bool) -> None:
    class Net(torch.nn.Module):
        def forward(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            assert (h.shape, x.shape) == ((2, 3, 8), (3, 4)) and h.is_contiguous()
            return x, h

    first, second = ("h", "x") if by_name else ("p", "q")
    request = {
        "inputs": [{"name": first}, {"name": second}],
        "outputs": ["y", "hn"],
        "batch_axes": {"inputs": {first: 1}, "outputs": {"hn": 1}},
    }
    hidden = torch.from_numpy(np.random.default_rng().standard_normal((3, 2, 8)))
    rows, back = Flat(Net(), request).module(hidden, torch.zeros(3, 4))
    assert rows.shape == (3, 4)
    torch.testing.assert_close(back, hidden)
