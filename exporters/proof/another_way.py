"""The original evaluated another way: what it then answers otherwise is FP32's own noise (`gate/noise.py`)."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ...models.spec.spec import ModelSpec
from ..gate.noise import Noise
from ..gate.parity import noise_of
from ..gate.trial import Trial
from ..question import Answers, Arrays, Question

ROWS = 16  # that are evaluated again
OPERATIONS = 1 << 34  # for each way; FP64 takes several times as long as FP32 for as many


def noise_among(
    spec: ModelSpec,
    questions: Iterable[Question],
    original: Answers,
    exact: Answers | None = None,
    row_operations: int = 0,
) -> Mapping[str, Noise]:
    """FP32's noise by output, on the first rows of the questions, which ``original`` has answered.

    ``exact``: the original in FP64, or with its sums in another order; None where there is none. Its rows one at a time
    are another way for every model that takes several.
    """
    rows = min(ROWS, max(1, OPERATIONS // max(row_operations, 1)))
    some = list(_first(spec, questions, rows))
    ways = [] if exact is None else [exact]
    if any(len(one.samples) > 1 for one in some):
        ways.append(one_at_a_time(original))
    return noise_of(
        spec, [Trial(one.samples, one.reference, way(one.inputs)) for way in ways for one in some]
    )


def one_at_a_time(answers: Answers) -> Answers:
    """A function that answers like ``answers``, but runs the model once for each row of a batch."""

    def answer(inputs: Arrays) -> dict[str, np.ndarray]:
        rows = min(map(len, inputs.values()))
        alone = [
            answers({name: array[row : row + 1] for name, array in inputs.items()}) for row in range(rows)
        ]
        return {name: np.concatenate([one[name] for one in alone]) for name in alone[0]}

    return answer


def _first(spec: ModelSpec, questions: Iterable[Question], rows: int) -> Iterator[Question]:
    """Questions with so many rows in all."""
    for one in questions:
        if rows <= 0:
            return
        yield one.first(rows) if spec.batched else one
        rows -= len(one.samples)
