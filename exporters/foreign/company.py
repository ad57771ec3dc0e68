"""Executions that a half is asked together: what a node costs by itself is the same for eight rows and for hundreds.

Only where the whole gives every row the same answer in company, and each execution is judged by itself all the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]

ELEMENTS = 1 << 14  # of inputs asked together; with more the work itself costs, and a failure comes late
SAME_IN_FP32 = 1e-4  # of an output's largest number: in company a product may be added up in another order


@dataclass(frozen=True, slots=True)
class Asked:
    """One execution: its inputs, the whole's answer, and the name of an adversarial input."""

    samples: tuple[int, ...]
    inputs: Arrays
    reference: Arrays
    name: str = ""


class Company:
    """Who is asked with whom. ``whole`` gives the FP32 answers."""

    def __init__(self, whole: Answers) -> None:
        self._whole = whole
        self._with: dict[int, Sequence[Asked]] = {}

    def gather(self, several: Sequence[Asked]) -> None:
        """Ask these together from now on, as many at a time as are small, where the whole answers them as it did."""
        for group in _groups(several):
            if len(group) > 1 and self._answers_as_before(group):
                self._with.update({id(one): group for one in group})

    def answered_by(self, half: Answers) -> Callable[[Asked], Arrays]:
        """What gives one execution's answers by ``half``, which is run once for all that are asked together."""
        known: dict[int, Arrays] = {}

        def answer(one: Asked) -> Arrays:
            group = self._with.get(id(one))
            if group is None:
                return half(one.inputs)
            if id(one) not in known:
                known.update(_apart(group, half(_joined(group))))
            return known.pop(id(one))

        return answer

    def _answers_as_before(self, group: Sequence[Asked]) -> bool:
        try:
            together = _apart(group, self._whole(_joined(group)))
        except Exception:  # whatever a runtime says of more rows than the model was made for
            return False
        return all(_same(one.reference, together[id(one)]) for one in group)


def _groups(several: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    """Neighbours in the list whose rows have the same shapes, up to `ELEMENTS`."""
    group: list[Asked] = []
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


def _shapes(one: Asked) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in one.inputs.values()]


def _joined(group: Sequence[Asked]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([one.inputs[name] for one in group]) for name in group[0].inputs}


def _apart(group: Sequence[Asked], answers: Arrays) -> dict[int, Arrays]:
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
