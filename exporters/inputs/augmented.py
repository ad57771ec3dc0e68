"""Makes further inputs out of few samples, so that a half is judged on inputs near the samples too.

Numbers get noise (`perturbed.py`), pictures are shifted and dimmed, integers continue as another sample from a random
place on. Masks stay as they are.
"""

import numpy as np

from ...models.pictures.pixels import Picture
from ...models.spec import ModelSpec, TensorSpec
from .perturbed import with_noise
from .samples import Samples

ENOUGH = 32  # samples: with so many, a proof needs no others
SHIFT = 8  # a picture moves by at most 1/8 of its height and width
DIMMEST = 0.7  # of a picture's brightness


def augmented(spec: ModelSpec, samples: Samples, seed: int = 0) -> Samples | None:
    """As many as ``samples`` lack to `ENOUGH`; None where they are enough, or where no input can be changed."""
    missing = ENOUGH - samples.count
    changed = [tensor for tensor in spec.inputs if _is_changed(tensor, samples)]
    if missing <= 0 or not changed:
        return None
    random = np.random.default_rng(seed)
    rows = np.arange(missing) % samples.count
    others, cuts = random.integers(0, samples.count, missing), random.random(missing)
    arrays = {name: array[rows] for name, array in samples.arrays.items()}
    for tensor in changed:
        array = samples.arrays[tensor.name]
        if tensor.picture is not None:
            spatial = Picture.of(tensor, spec.batched).spatial
            arrays[tensor.name] = _moved(array[rows], [axis + 1 for axis in spatial], random)
        elif tensor.type.is_float:
            arrays[tensor.name] = with_noise(array[rows], random)
        else:
            arrays[tensor.name] = _crossed(array[rows], array[others], cuts)
    return Samples(arrays, source="generated")


def _is_changed(tensor: TensorSpec, samples: Samples) -> bool:
    if "mask" in tensor.name.lower() or tensor.datatype == "BOOL":
        return False
    return tensor.type.is_float or (samples.arrays[tensor.name].ndim > 1 and samples.count > 1)


def _crossed(array: np.ndarray, other: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Each row of ``array`` up to its cut, a share of the last axis, and ``other`` from there on."""
    places = np.arange(array.shape[-1])
    starts = (cuts * array.shape[-1]).astype(int).reshape(-1, *(1,) * (array.ndim - 1))
    return np.where(places < starts, array, other)


def _moved(array: np.ndarray, axes: list[int], random: np.random.Generator) -> np.ndarray:
    """Each picture shifted, its edge repeated, and dimmed towards the least number of all."""
    rows, low = [], array.min(initial=0)
    for row in array:
        for axis in (axis - 1 for axis in axes):
            size = row.shape[axis]
            step = int(random.integers(-(size // SHIFT), size // SHIFT, endpoint=True))
            row = np.take(row, np.clip(np.arange(size) + step, 0, size - 1), axis=axis)
        rows.append(low + (row - low) * random.uniform(DIMMEST, 1.0))
    return np.stack(rows).astype(array.dtype)
