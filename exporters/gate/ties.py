"""Integer outputs that may differ because their scores tie (rule 2 of `parity.py`).

An index that comes out of topk, sort, argmax and their like, through shape and type ops alone, may be
another one where the original's own values at both indices are closer than 4u·S; S is the largest magnitude of
those values over all real judged samples. Where somebody else's value is in the place, however near in the
list, nothing is tolerated. Integers are compared with integers: only equal ones tie.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .divergence import SENTINEL, largest

MARGIN_U = 4.0
Arrays = Mapping[str, np.ndarray]


@dataclass(slots=True)
class Choice:
    """Facts of one output from one run of the original: the compared values, and the origin of its elements.

    ``values`` [lines, choices] FP64; element i of the flattened output is the index ``chosen[i]`` into line
    ``lines[i]``.
    """

    values: np.ndarray
    lines: np.ndarray
    chosen: np.ndarray
    integral: bool


@dataclass(slots=True)
class Ties:
    """Finds the elements of a batch that tie by running the original once more, only where integers differ.

    ``outputs``: those whose integers a comparison chose. ``choices`` gives what the original compares on some inputs,
    by output; ``judging`` the inputs of all real judged samples: S is asked of them at the first difference.
    """

    outputs: Sequence[str]
    choices: Callable[[Arrays], Mapping[str, Choice]]
    u: float
    judging: Callable[[], Iterable[Arrays]]
    scales: dict[str, float] = field(default_factory=dict)

    def tolerated(self, inputs: Arrays, reference: Arrays, candidate: Arrays) -> dict[str, np.ndarray]:
        """The elements of each output in which the candidate's integers may differ: what ``Trial.ties`` takes."""
        odd = [output for output in self.outputs if _differs(reference[output], candidate.get(output))]
        if not odd:
            return {}
        if not self.scales:
            self._measure()
        choices = self.choices(inputs)
        return {
            output: tolerated(
                choices[output],
                reference[output],
                candidate[output],
                MARGIN_U * self.u * self.scales[output],
            )
            for output in odd
        }

    def _measure(self) -> None:
        for inputs in self.judging():
            for output, choice in self.choices(inputs).items():
                self.scales[output] = max(self.scales.get(output, 0.0), largest(choice.values))


def tolerated(choice: Choice, reference: np.ndarray, candidate: np.ndarray, margin: float) -> np.ndarray:
    """True where the original's values at the reference's and at the candidate's index are closer than ``margin``.

    An index that is none, or that the candidate gives twice in one line where the original does not, is never
    tolerated; neither is anything where the reference is not what the original chooses now.
    """
    mine, others = reference.reshape(-1).astype(np.int64), candidate.reshape(-1).astype(np.int64)
    lines, width = choice.lines, choice.values.shape[1]
    valid = (others >= 0) & (others < width) & (mine == choice.chosen)
    safe = np.where(valid, others, 0)
    one, other = choice.values[lines, choice.chosen], choice.values[lines, safe]
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) < (0.0 if choice.integral else margin)
    masked = (np.abs(one) >= SENTINEL) & (np.abs(other) >= SENTINEL) & (np.sign(one) == np.sign(other))
    tie = valid & (near | (one == other) | masked)
    return (tie & ~_repeated(lines * width + safe, mine + lines * width)).reshape(reference.shape)


def lines_along(values: np.ndarray, indices: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The values as [lines, choices], and for every index along ``axis`` the line that it points into."""
    values = values if values.ndim else values.reshape(1)
    moved = np.moveaxis(values, axis, -1)
    numbers = np.arange(moved[..., 0].size, dtype=np.int64).reshape(moved.shape[:-1])
    if indices.ndim == values.ndim:
        numbers = np.expand_dims(numbers, axis)
    rows = moved.reshape(-1, moved.shape[-1])
    return rows, np.ascontiguousarray(np.broadcast_to(numbers, indices.shape))


def _repeated(candidate: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Elements whose (line, index) comes more often in the candidate than any does in the reference."""
    _, where, often = np.unique(candidate, return_inverse=True, return_counts=True)
    _, usual = np.unique(reference, return_counts=True)
    return often[where.reshape(-1)] > usual.max(initial=1)


def _differs(mine: np.ndarray, other: np.ndarray | None) -> bool:
    if other is None or mine.shape != other.shape or mine.dtype.kind not in "iu":
        return False
    return not np.array_equal(mine, other)
