"""Executions that a half is asked together: what a node costs by itself is the same for eight rows and for hundreds.

Only where the whole gives every row the same answer in company, and each execution is judged by itself all the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..question import Answers, Arrays, Question

ELEMENTS = 1 << 14  # of inputs asked together; with more the work itself costs, and a failure comes late
SAME_IN_FP32 = 1e-4  # of an output's largest number: in company a product may be added up in another order


class Company:
    """Who is asked with whom. ``whole`` gives the FP32 answers."""

    def __init__(self, whole: Answers) -> None:
        self._whole = whole
        self._with: dict[int, Sequence[Question]] = {}

    def gather(self, several: Sequence[Question]) -> None:
        """Ask these together from now on, as many at a time as are small, where the whole answers them as it did."""
        for group in _groups(several):
            if len(group) > 1 and self._answers_as_before(group):
                self._with.update({id(one): group for one in group})

    def ask(self, several: Iterable[Question]) -> Iterator[Question]:
        """The whole's answers to questions that have none, to be asked together from now on.

        One of each group is asked alone as well: who is answered otherwise in company is answered alone, and so are
        those he came with.
        """
        for group in _groups(several):
            together = self._asked_together(group) if len(group) > 1 else []
            self._with.update({id(one): together for one in together})
            yield from together or (replace(one, reference=self._whole(one.inputs)) for one in group)

    def _asked_together(self, group: Sequence[Question]) -> list[Question]:
        try:
            answers = _apart(group, self._whole(_joined(group)))
        except Exception:  # whatever a runtime says of more rows than the model was made for
            return []
        if not _same(self._whole(group[0].inputs), answers[id(group[0])]):
            return []
        return [replace(one, reference=answers[id(one)]) for one in group]

    def answered_by(self, half: Answers) -> Callable[[Question], Arrays]:
        """What gives one execution's answers by ``half``, which is run once for all that are asked together."""
        known: dict[int, Arrays] = {}

        def answer(one: Question) -> Arrays:
            group = self._with.get(id(one))
            if group is None:
                return half(one.inputs)
            if id(one) not in known:
                known.update(_apart(group, half(_joined(group))))
            return known.pop(id(one))

        return answer

    def _answers_as_before(self, group: Sequence[Question]) -> bool:
        try:
            together = _apart(group, self._whole(_joined(group)))
        except Exception:  # whatever a runtime says of more rows than the model was made for
            return False
        return all(_same(one.reference, together[id(one)]) for one in group)


def _groups(several: Iterable[Question]) -> Iterator[Sequence[Question]]:
    """Neighbours in the list whose rows have the same shapes, up to `ELEMENTS`."""
    group: list[Question] = []
    elements = 0
    for one in several:
        size = sum(array.size for array in one.inputs.values())
        if group and (elements + size > ELEMENTS or _shapes(one) != _shapes(group[0])):
            yield group
            group, elements = [], 0
        group.append(one)
        elements += size
    if group:
        yield group


def _shapes(one: Question) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in one.inputs.values()]


def _joined(group: Sequence[Question]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([one.inputs[name] for one in group]) for name in group[0].inputs}


def _apart(group: Sequence[Question], answers: Arrays) -> dict[int, Arrays]:
    rows = [len(one.samples) for one in group]
    ends = np.cumsum(rows).tolist()
    return {
        id(one): {name: array[end - count : end] for name, array in answers.items()}
        for one, count, end in zip(group, rows, ends, strict=True)
    }


def _same(reference: Arrays, together: Arrays) -> bool:
    return all(_close(one, together[name]) for name, one in reference.items())


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return np.array_equal(one, other)
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    return np.allclose(one, other, rtol=0.0, atol=SAME_IN_FP32 * scale, equal_nan=True)
