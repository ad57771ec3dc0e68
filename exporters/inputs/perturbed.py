"""Perturbed samples: a plan that passes only by chance on few samples fails on samples near them.

A large number whose square overflows, a small one whose square vanishes: such faults are rare among a dozen samples,
and samples with noise added cost only more runs.
"""

from collections.abc import Iterator

import numpy as np

from ...models.spec import ModelSpec
from .samples import Samples

COPIES = 3  # of the samples
NOISE = 0.5  # of the sample's own spread: far enough to be another sample, near enough to be one of its kind
MAX_ELEMENTS = 1 << 18  # of all samples together; larger ones are not perturbed


def perturbed(spec: ModelSpec, samples: Samples, copies: int = COPIES, seed: int = 0) -> Iterator[Samples]:
    """``copies`` of the samples with noise on their floating inputs; none where no input is floating, or where the
    samples are large."""
    floats = [
        t.name for t in spec.inputs if t.type.is_float and not t.picture and "mask" not in t.name.lower()
    ]
    if not floats or sum(samples.arrays[name].size for name in floats) > MAX_ELEMENTS:
        return
    random = np.random.default_rng(seed)
    for _ in range(copies):
        noisy = {name: with_noise(samples.arrays[name], random) for name in floats}
        yield Samples({**samples.arrays, **noisy}, source="generated")


def with_noise(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each number with normal noise of half its sample's standard deviation; a constant sample stays."""
    spread = array.std(axis=tuple(range(1, array.ndim)), keepdims=True) if array.ndim > 1 else array.std()
    return (array + NOISE * spread * random.standard_normal(array.shape)).astype(array.dtype)
