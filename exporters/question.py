"""A question to the whole and to its halves: inputs by name, with the whole's answer to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..models.errors import BadRequest, CannotConvert, EngineFailed, NotRun

# What a model raises for an input that it cannot be run with, for example one longer than its table of positions.
REFUSALS = (CannotConvert, EngineFailed, BadRequest, NotRun)
Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]
# Inputs, the whole's answers, a half's answers → for each output the integers that may differ: their scores tie.
TieTolerance = Callable[[Arrays, Arrays, Arrays], dict[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Question:
    """One execution: ``samples[i]`` is the sample in row i; an adversarial input has a ``name``."""

    samples: tuple[int, ...]
    inputs: Arrays
    reference: Arrays
    name: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the inputs and of the whole's answers."""
        return sum(array.nbytes for side in (self.inputs, self.reference) for array in side.values())

    def first(self, rows: int) -> "Question":
        """The first ``rows`` rows, of a model that is batched."""
        inputs, reference = (
            {name: array[:rows] for name, array in side.items()} for side in (self.inputs, self.reference)
        )
        return Question(self.samples[:rows], inputs, reference, self.name)


def takes(whole: Answers, inputs: Arrays) -> bool:
    """Whether the FP32 model ``whole`` can be run with ``inputs``: False where it raises one of `REFUSALS`."""
    try:
        whole(inputs)
    except REFUSALS:
        return False
    return True
