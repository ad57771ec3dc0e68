"""A size by which forward decides in Python is free only where the captured program answers as the module does."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.capture.capture import Captured, capture
from halfeven.models.folder.package import read_folder
from torch import Tensor, nn

from tests.model_folders import samples_of, tensor, write_folder
from tests.slow import drawn

SEEN = 6
SHAPES: dict[str, Any] = {
    "inputs": [tensor("x", "FP32", [-1, -1, 4])],
    "outputs": [tensor("y", "FP32", [-1, -1, 3])],
}
FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "of no size": lambda h: h,
    "by tensors": lambda h: h.cumsum(1) / torch.ones_like(h).cumsum(1),
    "an odd number is refused": lambda h: h.reshape(h.shape[0], h.shape[1] // 2, 2, 3).amax(2),
}
FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "even or odd": lambda h: h * (2 if h.shape[1] % 2 == 0 else 3),
    "a part for every four": lambda h: sum(part.mean(1, keepdim=True) for part in h.split(4, 1)) + h,
    "half as many again": lambda h: nn.functional.interpolate(h.mT, size=int(h.shape[1] * 1.5)).mT,
}
DECIDING = FREE | FIXED
CASES = [*product(DECIDING, ["module"]), *product(drawn(3, [*DECIDING]), ["program"])]


class Deciding(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, 3), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


def captured(path: Path, module: nn.Module, source: str) -> Captured:
    samples = samples_of({"x": [SEEN, 4]}, 8)
    if source == "module":
        folder = write_folder(path, "", max_batch_size=8, **SHAPES)
        return capture(replace(read_folder(folder), module=module.eval()), samples)
    folder = write_folder(path, "", source="program.pt2", max_batch_size=8, **SHAPES)
    free = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim.AUTO}
    program = torch.export.export(module.eval(), (torch.randn(3, SEEN, 4),), dynamic_shapes={"x": free})
    torch.export.save(program, folder / "program.pt2")
    return capture(read_folder(folder), samples)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), CASES)
def test_a_size_is_free_where_the_program_answers_as_what_it_was_made_from(
    name: str, source: str, tmp_path: Path
) -> None:
    found = captured(tmp_path / "net", Deciding(DECIDING[name]), source)
    size = found.spec.inputs[0].shape[1]
    if name in FIXED:
        assert size.fixed and size.minimum == SEEN, found.spec.inputs[0]
        assert (
            any(f"input 'x' must have size {SEEN} on axis 1" in note for note in found.notes)
            or source == "program"
        )
    elif source == "module" or name != "an odd number is refused":
        assert not size.fixed, found.notes


@pytest.mark.parametrize("name", ["of no size", "even or odd"])
def test_a_model_that_is_not_batched_has_the_axis_without_the_samples(name: str, tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "inputs": [tensor("x", "FP32", [-1, 1, 4])],
        "outputs": [tensor("y", "FP32", [-1, 1, 3])],
    }
    folder = write_folder(tmp_path / "net", "", max_batch_size=0, **shapes)
    module = Deciding(lambda h: DECIDING[name](h.transpose(0, 1)).transpose(0, 1)).eval()
    found = capture(replace(read_folder(folder), module=module), samples_of({"x": [SEEN, 1, 4]}, 8))
    size = found.spec.inputs[0].shape[0]
    assert size.fixed == (name in FIXED) and size.admits(SEEN), found.notes
