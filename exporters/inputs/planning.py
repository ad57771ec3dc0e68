"""The planning samples in the batches that every candidate plan and every profile runs on."""

from collections.abc import Iterator

import numpy as np

from ...models.spec import ModelSpec
from .samples import Samples

MAX_SAMPLES = 16
ROWS = 8  # of one execution


def few(planning: Samples) -> Samples:
    """The planning samples that every candidate plan answers."""
    return planning.take(slice(0, MAX_SAMPLES))


def executions(spec: ModelSpec, samples: Samples) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
    """Samples in small batches, with their numbers."""
    return samples.batches(min(ROWS, spec.max_batch_size, max(samples.count, 1)) if spec.batched else 0)
