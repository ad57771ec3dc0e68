"""What the gate is given: the answers of the whole and of the half to the same inputs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...models.spec import ModelSpec, TensorSpec

CHUNK_ELEMENTS = 1 << 22  # held in FP64 at a time


@dataclass(frozen=True, slots=True)
class Trial:
    """One execution by the whole and by the half: the same inputs, answers by output name.

    ``samples[i]`` is the sample in row i (a sample comes back at other batch sizes). A model that is not
    batched answers one sample without a batch axis. ``ties`` marks, by output, the integers that may
    differ because their scores tie. ``name`` is what an adversarial input is called.
    """

    samples: tuple[int, ...]
    reference: Mapping[str, np.ndarray]
    candidate: Mapping[str, np.ndarray]
    ties: Mapping[str, np.ndarray] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One output of one trial: axis 0 of each array is ``samples``; ``ties`` is True where two answers tie."""

    samples: tuple[int, ...]
    reference: np.ndarray
    candidate: np.ndarray
    ties: np.ndarray | None = None

    def chunks(self) -> Iterator["Pair"]:
        """Whole rows, as many at a time as may be held in FP64."""
        rows = max(1, CHUNK_ELEMENTS * len(self.samples) // max(1, self.reference.size))
        for start in range(0, len(self.samples), rows):
            part = slice(start, start + rows)
            reference, candidate = (
                side[part].astype(np.float64) for side in (self.reference, self.candidate)
            )
            yield Pair(self.samples[part], reference, candidate)


def pairs_of(spec: ModelSpec, tensor: TensorSpec, trials: Iterable[Trial]) -> list[Pair]:
    """One output of every trial; a model that is not batched gets a batch axis of one."""

    def rows(array: np.ndarray) -> np.ndarray:
        return array if spec.batched else array[None]

    return [
        Pair(
            trial.samples,
            rows(trial.reference[tensor.name]),
            rows(trial.candidate[tensor.name]),
            rows(trial.ties[tensor.name]) if tensor.name in trial.ties else None,
        )
        for trial in trials
    ]
