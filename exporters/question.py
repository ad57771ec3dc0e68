"""A question to the original and to its halves: inputs by name, with the original's answer to them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..models.engines.faults import out_of_memory
from ..models.errors import BadRequest, CannotConvert, EngineFailed, NotRun, OrderEnded

# The errors that a model raises for an input that it cannot be run with, for example one longer than its table of
# positions. The last three are torch's.
REFUSALS = (CannotConvert, EngineFailed, BadRequest, NotRun, IndexError, RuntimeError, ValueError)
# The share of an output's largest number by which a row's answer may differ among other rows, where a product may be
# added up in another order; within a file in half precision that shows a hundred times as much.
SAME_AMONG_OTHERS, SAME_AMONG_OTHERS_IN_HALF = 1e-4, 1e-2
Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]
# Inputs, the original's answers, a half's answers → for each output the integers that may differ: their scores tie.
TieTolerance = Callable[[Arrays, Arrays, Arrays], dict[str, np.ndarray]]
# Bounds, in counts, of the work that an input which the conversion invented may ask of the original.
ROOM = 64  # times as many passes of a loop, and elements of a value, as any sample needs are still made
PASSES_AT_LEAST = 1000
ELEMENTS_AT_LEAST = 1 << 16


@dataclass(frozen=True, slots=True)
class Question:
    """One execution: ``samples[i]`` is the sample in row i; an adversarial input has a ``name``."""

    samples: tuple[int, ...]
    inputs: Arrays
    reference: Arrays
    name: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the inputs and of the original's answers."""
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


def first_rows(questions: Iterable[Question], rows: int, batched: bool) -> Iterator[Question]:
    """Questions with so many rows in all."""
    for one in questions:
        if rows <= 0:
            return
        yield one.first(rows) if batched else one
        rows -= len(one.samples)


class RowsDiffer(CannotConvert):
    """The answers to single rows differ in shape, so that such rows cannot share a batch: a conversion takes each row
    alone then."""

    code = "rows_differ"


def answers_or_refusal(half: Answers, inputs: Arrays) -> Arrays | Exception:
    """The answers of a half, or the error that says why it does not run with these inputs.

    An error that says that memory or time was lacking is raised: how small or busy a machine is decides no verdict.
    """
    try:
        return half(inputs)
    except REFUSALS as error:
        if isinstance(error, OrderEnded) or out_of_memory(error):
            raise
        return error


def is_refused(answers: Answers | None, inputs: Arrays) -> bool:
    """True if a model does not run with these inputs; false where there is no model."""
    return answers is not None and isinstance(answers_or_refusal(answers, inputs), Exception)


def same_among_others(
    alone: np.ndarray, row: np.ndarray, largest: float, share: float = SAME_AMONG_OTHERS
) -> bool:
    """True if a row is answered among others as it is alone: integers are equal, numbers nearly so. ``largest``: of the
    output (`largest_of`)."""
    if alone.shape != row.shape or alone.dtype.kind != "f":
        return np.array_equal(alone, row)
    return np.allclose(
        alone.astype(np.float64), row.astype(np.float64), rtol=0.0, atol=share * largest, equal_nan=True
    )


def largest_of(output: np.ndarray) -> float:
    """The largest finite magnitude; 0 where there is none."""
    return float(np.abs(output[np.isfinite(output)]).max(initial=0.0))


@dataclass(slots=True)
class Invented:
    """Asks the FP32 model ``original`` inputs that the conversion made itself. An input that it refuses is left out.

    ``made`` and ``refused`` count the rows so far.
    """

    original: Answers
    made: int = 0
    refused: int = 0

    @property
    def is_used(self) -> bool:
        """False where the model refuses more than half of these inputs: the rest are then unlike its real inputs."""
        return 2 * self.refused <= self.made

    def answered(self, questions: Iterable[Question]) -> Iterator[Question]:
        """The questions with the model's answers. Of several rows those that are refused are left out."""
        for one in questions:
            try:
                answered = replace(one, reference=self.original(one.inputs))
            except OrderEnded:
                raise
            except REFUSALS:
                if len(one.samples) > 1:
                    yield from self.answered(one.rows())
                    continue
                self.refused += len(one.samples)
            else:
                yield answered
            self.made += len(one.samples)
