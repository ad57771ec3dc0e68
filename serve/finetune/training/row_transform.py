"""The ``transform`` of a model folder: a function that augments each row that is learnt from. Held-out rows are not
given to it. Needs torch alone.

A batch is read inside of the training's autocast, which is for the model's forward and the loss: the function is run
outside of it, so that a matrix product of coordinates is one of FP32.

Before each call the generators of torch, numpy and Python are seeded from the job's seed, the epoch and the row. So
what the function draws depends neither on the batch, on its parts, on the format of the file, nor on where a training
was interrupted, and a checkpoint need not hold any of it.
"""

import hashlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .loop.losses import own_function
from .loop.seeding import generators_untouched, seed_everything
from .loop.training_terms import Stopped

Row = dict[str, Tensor]
KEY = "transform"


class RowTransform:
    """``called`` gets the inputs and the targets of one row by name, without the axis of rows, and gives both. It is
    code of ``folder``. ``left_out``: rows of the caller's file that the data are without, rising."""

    def __init__(
        self, name: str, called: Callable[[Row, Row], Any], seed: int, folder: str, left_out: Sequence[int] = ()
    ) -> None:  # fmt: skip
        self.name, self.called, self.seed, self.folder, self.left_out = name, called, seed, folder, left_out
        self.epoch = 0

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> "RowTransform | None":
        """None where the model has none. Raises Stopped where its file has no such function."""
        if not (name := request.get(KEY)):
            return None
        called, folder = own_function(name, request["source"], KEY), request["source"]["folder"]
        return cls(name, called, request["seed"], folder, request.get("left_out", ()))

    def rows(self, numbers: Sequence[int], inputs: Row, targets: Row) -> tuple[Row, Row]:
        """Several rows, whose tensors are stacked and belong to the caller alone. Raises Stopped."""
        if not numbers:
            return inputs, targets
        with generators_untouched(), outside_of_the_precision():
            found = [
                self.row(number, _at(inputs, place), _at(targets, place))
                for place, number in enumerate(numbers)
            ]
            rows = [{name: torch.stack([one[part][name] for one in found]) for name in whole}
                    for part, whole in enumerate((inputs, targets))]  # fmt: skip
        return rows[0], rows[1]

    def row(self, number: int, inputs: Row, targets: Row) -> tuple[Row, Row]:
        """One row. The generators are seeded afterwards as this row has it."""
        before = _facts(inputs), _facts(targets)
        drawn = hashlib.blake2b(f"{self.seed}:{self.epoch}:{number}".encode(), digest_size=7).digest()
        seed_everything(int.from_bytes(drawn, "little"))
        try:
            found = self.called(inputs, targets)
        except Exception as error:
            raise self._stopped(number, f"{type(error).__name__} in {self._line(error)}: {error}") from error
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(one, dict) for one in found):
            raise self._stopped(number, f"expected (inputs, targets), two dicts, got {type(found).__name__}")
        for what, old, new in zip(("inputs", "targets"), before, map(_facts, found), strict=True):
            if old != new:
                raise self._stopped(
                    number, f"expected {what} of the same names, shapes and dtypes, {old}, got {new}"
                )
        return found

    def _line(self, error: Exception) -> str:
        """The innermost line of the operator's folder that the error passed."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(self.folder)]
        where = (own or frames)[-1]
        return f"{where.filename.rpartition('/')[2]}, line {where.lineno}"

    def _stopped(self, number: int, fault: str) -> Stopped:
        number = in_the_callers_file(number, self.left_out)
        remedy = f"Mend the function, or take {KEY} out of [training] in model.toml, and convert again"
        return Stopped("USER_CODE", f"{KEY} = {self.name!r}: row {number}: {fault}. {remedy}")


@contextmanager
def outside_of_the_precision() -> Iterator[None]:
    """Inside, nothing of a job's precision acts: no autocast of any device, and no product that is emulated."""
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_disable_current_modes())
        yield


def in_the_callers_file(number: int, left_out: Sequence[int]) -> int:
    """The row of the caller's file that a row of the data is. ``left_out``: rows that the data are without, rising."""
    for row in left_out:
        number += row <= number
    return number


def _at(tensors: Row, place: int) -> Row:
    return {name: one[place] for name, one in tensors.items()}


def _facts(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape by name; of what is no tensor its type."""
    return {name: _fact(one) for name, one in tensors.items()}


def _fact(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
