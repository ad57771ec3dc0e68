"""A question to the whole and to its halves: inputs by name, with the whole's answer to them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..models.errors import BadRequest, CannotConvert, EngineFailed, NotRun

# What a model raises for an input that it cannot be run with, for example one longer than its table of positions; the
# last three are torch's.
REFUSALS = (CannotConvert, EngineFailed, BadRequest, NotRun, IndexError, RuntimeError, ValueError)
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

    def rows(self) -> Iterator["Question"]:
        """One question for each row, without answers, of a model that is batched."""
        for row, sample in enumerate(self.samples):
            inputs = {name: array[row : row + 1] for name, array in self.inputs.items()}
            yield Question((sample,), inputs, {}, self.name)


def answers_or_refusal(half: Answers, inputs: Arrays) -> Arrays | Exception:
    """The answers of a half, or the error that says why it does not run with these inputs."""
    try:
        return half(inputs)
    except REFUSALS as error:
        return error


def takes(whole: Answers, inputs: Arrays) -> bool:
    """Whether the FP32 model ``whole`` can be run with ``inputs``: False where it raises one of `REFUSALS`."""
    try:
        whole(inputs)
    except REFUSALS:
        return False
    return True


@dataclass(slots=True)
class Invented:
    """Asks the FP32 model what nobody gave: an input that it refuses is left out and counted.

    ``made`` and ``refused``: rows so far.
    """

    whole: Answers
    made: int = 0
    refused: int = 0

    @property
    def is_used(self) -> bool:
        """False where the model refuses more than half of such inputs: the others say little of its own."""
        return 2 * self.refused <= self.made

    def answered(self, questions: Iterable[Question]) -> Iterator[Question]:
        """The questions with the model's answers. Of several rows those that are refused are left out."""
        for one in questions:
            try:
                answered = replace(one, reference=self.whole(one.inputs))
            except REFUSALS:
                if len(one.samples) > 1:
                    yield from self.answered(one.rows())
                    continue
                self.refused += len(one.samples)
            else:
                yield answered
            self.made += len(one.samples)
