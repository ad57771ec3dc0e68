"""The planning samples in the batches that every candidate plan and every profile runs on."""

from collections.abc import Iterator

import numpy as np

from ...models.spec.spec import ModelSpec
from ..policy.operations import UNKNOWN, Operations
from .samples import Samples

MAX_SAMPLES = 16
FEWEST = 2
SLOW_SAMPLES = 8  # instead of `MAX_SAMPLES`, where those would need more than `OPERATIONS`
OPERATIONS = 1 << 34
BYTES = 1 << 28  # of the inputs and answers of all of them
ROWS = 8  # of one execution


def few(planning: Samples, operations: Operations = UNKNOWN, of_a_row: int = 0) -> Samples:
    """The first planning samples: every candidate plan is tried on them. ``operations``: of one execution of the
    model; ``of_a_row``: the bytes of one sample and its answer."""
    row = operations.of(planning.take(slice(0, 1)).arrays)
    slow = row * min(planning.count, MAX_SAMPLES) > OPERATIONS
    most = SLOW_SAMPLES if slow else MAX_SAMPLES
    return planning.take(slice(0, min(most, max(FEWEST, BYTES // max(of_a_row, 1)))))


def executions(spec: ModelSpec, samples: Samples) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
    """Samples in small batches, with their numbers."""
    return samples.batches(min(ROWS, spec.max_batch_size, max(samples.count, 1)) if spec.batched else 0)
