"""Batched evaluation: several executions are run as one, and each is judged by itself.

What a node of a graph costs by itself is the same for eight rows and for hundreds. Done only where the original gives a
row the same answer among others.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ..policy.operations import Operations
from ..question import (
    REFUSALS,
    Answers,
    Arrays,
    Invented,
    Question,
    answers_or_refusal,
    largest_of,
    same_among_others,
)

ELEMENTS = 1 << 14  # of inputs run at once; with more the work itself costs, and a failure comes late
OPERATIONS = 1 << 33  # run at once, in the same way: of a large model fewer elements


@dataclass(frozen=True, slots=True)
class Batch:
    """Executions that are run as one; one alone is run as it is."""

    questions: tuple[Question, ...]

    def answers(self, half: Answers) -> Iterator[tuple[Question, Arrays | Exception]]:
        """Each question with the half's answers, or with the error where the half does not run with its inputs."""
        together = list[Arrays]()
        if len(self.questions) > 1:
            with suppress(*REFUSALS):
                together = _run_as_one(self.questions, half)
        if together:
            yield from zip(self.questions, together, strict=True)
        else:
            yield from ((one, answers_or_refusal(half, one.inputs)) for one in self.questions)


def batches(
    questions: Iterable[Question], original: Answers, most: int = ELEMENTS, invented: Invented | None = None
) -> Iterator[Batch]:
    """The questions with the original's answers, in order, those alike in shape in batches of ``most`` elements of
    inputs; a larger one is alone.

    The first of each batch is run alone as well: where it is answered otherwise among others, or where the original
    takes no more rows, all of that batch are answered and run alone. ``invented`` is given where the questions are:
    what the original refuses is left out.
    """
    for group in _groups(questions, most):
        if joined := _joined(group, original) if len(group) > 1 else None:
            yield joined
            if invented is not None:
                invented.made += sum(len(one.samples) for one in group)
        elif invented is not None:
            yield from (Batch((one,)) for one in invented.answered(group))
        else:
            yield from (Batch((replace(one, reference=original(one.inputs)),)) for one in group)


def _joined(group: Sequence[Question], original: Answers) -> Batch | None:
    try:
        answers = _run_as_one(group, original)
        if not _same(original(group[0].inputs), answers[0]):
            return None
    except Exception:  # whatever a runtime raises for more rows than the model was made for
        return None
    return Batch(tuple(replace(one, reference=its) for one, its in zip(group, answers, strict=True)))


def _run_as_one(group: Sequence[Question], answers: Answers) -> list[Arrays]:
    names = group[0].inputs
    found = answers({name: np.concatenate([one.inputs[name] for one in group]) for name in names})
    ends = np.cumsum([len(one.samples) for one in group])[:-1]
    parts = {name: np.split(array, ends) for name, array in found.items()}
    return [{name: parts[name][index] for name in parts} for index in range(len(group))]


def elements_together(operations: Operations) -> int:
    """The number of input elements that may be run at once. ``operations``: of one execution."""
    return min(ELEMENTS, OPERATIONS * operations.inputs // max(operations.varying, 1))


def _groups(questions: Iterable[Question], most: int) -> Iterator[Sequence[Question]]:
    """Consecutive ones whose rows have the same shapes, of up to so many elements."""
    group: list[Question] = []
    elements = 0
    for one in questions:
        size = sum(array.size for array in one.inputs.values())
        if group and (elements + size > most or _shapes(one) != _shapes(group[0])):
            yield group
            group, elements = [], 0
        group.append(one)
        elements += size
    if group:
        yield group


def _shapes(one: Question) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in one.inputs.values()]


def _same(alone: Arrays, among_others: Arrays) -> bool:
    return all(same_among_others(one, among_others[name], largest_of(one)) for name, one in alone.items())
