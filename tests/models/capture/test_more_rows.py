"""A program that was exported for one row takes many where its graph allows it, with the answers to one at a time."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.capture.batch_place import place_of_batch
from halfeven.models.capture.capture import Captured, capture
from halfeven.models.errors import CaptureFailed
from halfeven.models.folder.package import read_folder
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.exporters.onnx.free_rows import Attention, Convolutional
from tests.model_folders import samples_of, tensor, write_folder
from tests.recurrent import HIDDEN, LAYERS, STEPS, WIDTH, state

FREED = "the program was exported for one row: its batch was made free"


class Recurrent(nn.Module):
    """A net with its own initial state for one layer, and the caller's, with the batch on axis 1, for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.second = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden, (h, _) = self.second(self.first(x)[0], (h, h))
        return hidden[:, -1], h


class Mixed(nn.Module):
    """A net in which rows see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 0)


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.squeeze(0) * 2).unsqueeze(0)


def captured(path: Path, module: nn.Module, settings: dict[str, Any], *shapes: tuple[int, ...]) -> Captured:
    """``shapes``: of the example that the program is exported with; the inputs are called as the module does."""
    folder = write_folder(path, "", source="program.pt2", max_batch_size=8, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the flat weights of its recurrent layers
        program = torch.export.export(module.eval(), tuple(map(torch.randn, shapes)))
    torch.export.save(program, folder / "program.pt2")
    names = [entry["name"] for entry in settings["inputs"]]
    axes = [entry.get("batch_axis", 0) for entry in settings["inputs"]]
    rows = {n: (*s[:axis], *s[axis + 1 :]) for n, s, axis in zip(names, shapes, axes, strict=True)}
    return capture(read_folder(folder), samples_of(rows, 8))


def plain(*shape: int, out: tuple[int, ...]) -> dict[str, Any]:
    return {
        "inputs": [tensor("x", "FP32", [-1, *shape])],
        "outputs": [tensor("y", "FP32", [-1, *out])],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "shape"),
    [(Convolutional, (3, 8, 8)), pytest.param(Attention, (3, 6, 4), marks=pytest.mark.slow)],
)
def test_a_program_made_for_one_row_answers_a_batch_as_its_module_one_at_a_time(
    net: type[nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    made = net()
    found = captured(tmp_path / "net", made, plain(*shape, out=(5,)), (1, *shape))
    assert found.spec.max_batch_size == 8 and FREED in found.notes, found.notes
    rows = torch.randn(7, *shape)
    with torch.inference_mode():
        (together,) = runnable(found.program)(rows)
        alone = torch.cat([made(rows[row : row + 1]) for row in range(7)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_states_on_axis_1_are_followed(tmp_path: Path) -> None:
    made = Recurrent()
    settings = {
        "inputs": [tensor("x", "FP32", [-1, STEPS, WIDTH]), state("h")],
        "outputs": [tensor("y", "FP32", [-1, HIDDEN]), state("hn")],
    }
    found = captured(tmp_path / "net", made, settings, (1, STEPS, WIDTH), (LAYERS, 1, HIDDEN))
    assert found.spec.max_batch_size == 8 and FREED in found.notes, found.notes
    x, h = torch.randn(5, STEPS, WIDTH), torch.randn(LAYERS, 5, HIDDEN)
    with torch.inference_mode():
        together = runnable(found.program)(x, h.movedim(1, 0))
        expected = made(x, h)
    torch.testing.assert_close(together[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1].movedim(0, 1), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("net", [Mixed, Squeezed])
def test_a_batch_that_cannot_be_made_free_stays_one_and_the_notes_say_so(
    net: type[nn.Module], tmp_path: Path
) -> None:
    found = captured(tmp_path / "net", net(), plain(6, out=(6,)), (1, 6))
    assert found.spec.max_batch_size == 1
    assert any("max_batch_size" in note and " 1" in note for note in found.notes), found.notes


@pytest.mark.slow
def test_a_program_with_another_fixed_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureFailed):
        captured(tmp_path / "net", nn.Linear(6, 6), plain(6, out=(6,)), (3, 6))


@pytest.mark.parametrize(
    ("sizes", "in_front", "axis"),
    [
        ((1, 6), 1, 0),  # the batch stays in front
        ((3, 1, 6), 3, 1),  # behind the steps
        ((6, 5), 1, 0),  # merged with what follows
        ((4, 2, 3), 4, 1),  # with the heads
        ((4, 6), 4, 0),  # with the steps, not with the features
        ((12, 6), 4, 0),  # in the middle of an axis
        ((5, 6), 4, None),  # it would be cut
    ],
)
def test_the_batch_goes_where_the_same_elements_are_in_front_of_it(
    sizes: tuple[int, ...], in_front: int, axis: int | None
) -> None:
    assert place_of_batch(sizes, in_front) == axis
