"""The input of the gate: the answers of the original and of the half to the same inputs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...models.spec.spec import ModelSpec, TensorSpec

CHUNK_ELEMENTS = 1 << 22  # held in FP64 at a time


@dataclass(frozen=True, slots=True)
class Trial:
    """One execution by the original and by the half: the same inputs, answers by output name.

    ``samples[i]`` is the sample in row i (a sample comes back at other batch sizes). A model that is not
    batched answers one sample without a batch axis. ``ties`` marks, by output, the elements that may differ because
    their scores tie, or because they come from a step. ``name`` is what an adversarial input is called. ``refused``:
    the error of a half that does not run with what the original takes; it has no answers then. ``stepped``: the outputs
    that come from a step (`steps.py`); their ties have a limit.
    """

    samples: tuple[int, ...]
    reference: Mapping[str, np.ndarray]
    candidate: Mapping[str, np.ndarray]
    ties: Mapping[str, np.ndarray] = field(default_factory=dict)
    name: str = ""
    refused: str = ""
    stepped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """One output of one trial: axis 0 of each array is ``samples``; ``ties`` is True where two answers tie.
    ``stepped``: at steps. ``replaced``: so many numbers of each row tie and are left out: they are those of the
    reference."""

    samples: tuple[int, ...]
    reference: np.ndarray
    candidate: np.ndarray
    ties: np.ndarray | None = None
    stepped: bool = False
    replaced: tuple[int, ...] = ()

    def chunks(self) -> Iterator["Pair"]:
        """Whole rows, as many at a time as may be held in FP64."""
        rows = max(1, CHUNK_ELEMENTS * len(self.samples) // max(1, self.reference.size))
        for start in range(0, len(self.samples), rows):
            part = slice(start, start + rows)
            reference, candidate = (
                side[part].astype(np.float64) for side in (self.reference, self.candidate)
            )
            yield Pair(self.samples[part], reference, candidate)


def by_row(wrong: np.ndarray) -> tuple[int, ...]:
    """The number of elements of each row that are True."""
    return tuple(wrong.sum(tuple(range(1, wrong.ndim))).tolist())


def pairs_of(spec: ModelSpec, tensor: TensorSpec, trials: Iterable[Trial]) -> list[Pair]:
    """One output of every trial; a model that is not batched gets a batch axis of one."""

    def rows(array: np.ndarray) -> np.ndarray:
        return array if spec.batched else array[None]

    def pair(trial: Trial) -> Pair:
        reference, candidate = rows(trial.reference[tensor.name]), rows(trial.candidate[tensor.name])
        ties = rows(trial.ties[tensor.name]) if tensor.name in trial.ties else None
        replaced: tuple[int, ...] = ()
        if ties is not None and candidate.dtype.kind == "f":
            replaced = by_row(ties & (candidate != reference))
            candidate = np.where(ties, reference, candidate)
        return Pair(trial.samples, reference, candidate, ties, tensor.name in trial.stepped, replaced)

    return [pair(trial) for trial in trials]


def counted_axes(spec: ModelSpec, tensor: TensorSpec, real: Iterable[Trial]) -> frozenset[int]:
    """The axes of an output (of its pairs) whose sizes the values of an input decide, as the number of things found.

    Samples have inputs of one shape: an axis that has several sizes among their answers is one, and so is a free one
    where no input has a free axis beside the batch.
    """
    first = 1 if spec.batched else 0
    shapes = {trial.reference[tensor.name].shape[first:] for trial in real}
    settled = all(dim.fixed for each in spec.inputs for dim in each.shape[first:])
    free = (axis for axis, dim in enumerate(tensor.shape[first:]) if not dim.fixed)
    return frozenset(axis + 1 for axis in free if settled or len({shape[axis] for shape in shapes}) > 1)
