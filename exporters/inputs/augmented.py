"""Makes further inputs out of few samples (`perturbed.py`), so that a half is judged on inputs near the samples too."""

import numpy as np

from ...models.spec import ModelSpec
from .perturbed import changeable, perturbed_rows
from .samples import Samples

ENOUGH = 32  # samples: with so many, a proof needs no others


def augmented(spec: ModelSpec, samples: Samples, seed: int = 0) -> Samples | None:
    """As many as ``samples`` lack to `ENOUGH`; None where they are enough, or where no input can be changed."""
    missing = ENOUGH - samples.count
    if missing <= 0 or not changeable(spec, samples):
        return None
    return perturbed_rows(spec, samples, np.arange(missing) % samples.count, np.random.default_rng(seed))
