"""Integers and booleans that come from a step: a rounding, a cast to integers, a comparison with a threshold.

Where the original's own value lies within 4u·S of the step, another precision may land on its other side: a near tie, as
of argmax (`ties.py`). S is the largest magnitude of the values that are compared, over all real judged samples. Such
elements are counted, and their share has a limit (``max_flips``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from .divergence import SENTINEL
from .ties import MARGIN_U, Ties

Arrays = Mapping[str, np.ndarray]
N = TypeVar("N")  # a node of a captured program or of an ONNX file
VALUES = {"compare": 2, "round": 1, "floor": 1}  # by the kind of a step: how many values it takes


@dataclass(frozen=True, slots=True)
class Stepped(Generic[N]):
    """An output whose integers or booleans come from ``node``, a step of this ``kind``; ``path``: the nodes from there
    to the output."""

    output: str
    node: N
    kind: str
    path: tuple[N, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """How far the values of one output are from their step, in one run of the FP32 model.

    ``distances``: of each element, FP64. ``largest``: the largest magnitude of the numbers that were compared.
    """

    distances: np.ndarray
    largest: float


@dataclass(slots=True)
class Steps:
    """Finds near ties at steps by running the original once more, only where integers or booleans differ.

    ``outputs``: those that come from a step. ``steps`` gives the steps of some inputs, by output; ``judging`` the
    inputs of all real judged samples: S is asked of them at the first difference.
    """

    outputs: Sequence[str]
    steps: Callable[[Arrays], Mapping[str, Step]]
    u: float
    judging: Callable[[], Iterable[Arrays]]
    scales: dict[str, float] = field(default_factory=dict)

    def tolerated(self, inputs: Arrays, reference: Arrays, candidate: Arrays) -> dict[str, np.ndarray]:
        """For each output the elements in which the candidate may differ, by one at most: what ``Trial.ties`` takes."""
        odd = [name for name in self.outputs if _differs(reference[name], candidate.get(name))]
        if not odd:
            return {}
        if not self.scales:
            for each in self.judging():
                for name, step in self.steps(each).items():
                    self.scales[name] = max(self.scales.get(name, 0.0), step.largest)
        found = self.steps(inputs)
        return {name: self._near(name, found[name], reference[name], candidate[name]) for name in odd}

    def _near(self, name: str, step: Step, reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        if step.distances.shape != reference.shape:
            return np.zeros(reference.shape, bool)
        by_one = np.abs(reference.astype(np.float64) - candidate.astype(np.float64)) <= 1
        return (step.distances < MARGIN_U * self.u * self.scales[name]) & by_one


def _differs(mine: np.ndarray, other: np.ndarray | None) -> bool:
    return other is not None and mine.shape == other.shape and not np.array_equal(mine, other)


@dataclass(frozen=True, slots=True)
class NearTies:
    """Says which elements of integer and boolean outputs a half may answer otherwise (`question.TieTolerance`): those
    that a comparison of scores chose (``choices``), and those that come from a step (``steps``)."""

    choices: Ties | None
    steps: Steps | None

    @property
    def stepped(self) -> frozenset[str]:
        """The outputs that come from a step. The share of their near ties has a limit."""
        return frozenset(self.steps.outputs if self.steps else ())

    def __call__(self, inputs: Arrays, reference: Arrays, candidate: Arrays) -> dict[str, np.ndarray]:
        found = self.choices.tolerated(inputs, reference, candidate) if self.choices else {}
        return found | (self.steps.tolerated(inputs, reference, candidate) if self.steps else {})


def near_ties(choices: Ties | None, steps: Steps | None) -> NearTies | None:
    """The near ties of a model; None where no output can differ by one."""
    return NearTies(choices, steps) if choices or steps else None


def step_of(kind: str, values: Sequence[np.ndarray]) -> Step:
    """The step of an operation of this ``kind`` on these values. Whole numbers lie near no step: no distances."""
    if values[0].dtype.kind != "f":
        return Step(np.zeros(0), 0.0)
    return Step(np.asarray(distance_of(kind, values)), _largest(values))


def distance_of(kind: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """How far each value is from the step of an operation of this ``kind``: ``compare`` (two values), ``round``,
    ``floor`` (ceil and truncation too: whole numbers)."""
    first = values[0].astype(np.float64)
    with np.errstate(invalid="ignore"):
        if kind == "compare":
            return np.abs(first - values[1].astype(np.float64))
        if kind == "round":
            return np.abs(first - np.floor(first) - 0.5)
        return np.abs(first - np.round(first))


def _largest(values: Sequence[np.ndarray]) -> float:
    """The largest magnitude of the values, without those that stand for a mask."""
    sizes = [np.abs(value[np.isfinite(value)].astype(np.float64)) for value in values]
    return max((float(size[size < SENTINEL].max(initial=0.0)) for size in sizes), default=0.0)
