"""Perturbed samples: a plan that passes only by chance on few samples fails on samples near them.

A large number whose square overflows, a small one whose square vanishes: such faults are rare among a dozen samples,
and perturbed samples cost only more runs. Numbers get noise, pictures are shifted and dimmed, whole numbers continue as
those of another sample from a random place on. Masks and lengths stay as they are.
"""

import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from ...models.pictures.pixels import Picture
from ...models.spec.said_by_name import is_mask
from ...models.spec.spec import ModelSpec, TensorSpec
from .samples import Samples

COPIES = 3  # of the samples
NOISE = 0.5  # of the sample's own spread: far enough to be another sample, near enough to be one of its kind
MAX_ELEMENTS = 1 << 18  # of all samples together, for `perturbed_if_small`
MAX_OPERATIONS = 1 << 36  # of one run of all those copies, in the same way
SHIFT = 8  # a picture moves by at most 1/8 of its height and width
_FEWEST, _OF_KINDS = 4, 8.0  # samples; times as wide as another column
DIMMEST = 0.7  # of a picture's brightness


def perturbed_if_small(spec: ModelSpec, samples: Samples, operations: int) -> Iterator[Samples]:
    """`COPIES` perturbed copies of the samples, which every trial of a plan asks; none where the samples have more than
    `MAX_ELEMENTS` or the copies need more than `MAX_OPERATIONS`, because trials would take too long. ``operations``: of
    one run of the samples."""
    elements = sum(samples.arrays[tensor.name].size for tensor in changeable(spec, samples))
    small = elements <= MAX_ELEMENTS and COPIES * operations <= MAX_OPERATIONS
    return perturbed(spec, samples, COPIES) if small else iter(())


def perturbed(spec: ModelSpec, samples: Samples, copies: int, seed: int = 0) -> Iterator[Samples]:
    """``copies`` perturbed copies of the samples, one at a time; none where no input can be changed."""
    if not changeable(spec, samples):
        return
    random = np.random.default_rng(seed)
    rows = np.arange(samples.count)
    for _ in range(copies):
        yield perturbed_rows(spec, samples, rows, random)


def changeable(spec: ModelSpec, samples: Samples) -> list[TensorSpec]:
    """The inputs that a perturbation changes."""

    def changes(tensor: TensorSpec) -> bool:
        array = samples.arrays[tensor.name]
        if is_mask(tensor) or tensor.datatype == "BOOL" or tensor.lengths_of or not array.size:
            return False
        if tensor.type.is_float and (tensor.picture or not _whole_columns(array).all()):
            return True
        if tensor.type.is_float and (array == array.flat[0]).all():
            return True  # its copies are equal, and equal samples prove nothing
        return samples.count > 1 and (tensor.type.is_float or array.ndim > 1)  # they come from another sample

    return [tensor for tensor in spec.inputs if changes(tensor)]


def perturbed_rows(
    spec: ModelSpec, samples: Samples, rows: Sequence[int] | np.ndarray, random: np.random.Generator
) -> Samples:
    """The samples of these numbers, perturbed; a number may occur several times."""
    changed = changeable(spec, samples)
    arrays = {name: array[rows] for name, array in samples.arrays.items()}
    whole = {
        tensor.name: columns
        for tensor in changed
        if not tensor.picture and (columns := _whole_columns(samples.arrays[tensor.name])).any()
    }
    crossed = dict[str, np.ndarray]()
    if whole:
        others, cuts = random.integers(0, samples.count, len(rows)), random.random(len(rows))
        crossed = {name: _crossed(arrays[name], samples.arrays[name][others], cuts) for name in whole}
    for tensor in changed:
        name = tensor.name
        if tensor.picture is not None:
            spatial = Picture.of(tensor, spec.batched).spatial
            arrays[name] = _moved(arrays[name], [axis + 1 for axis in spatial], random)
        elif tensor.type.is_float:
            arrays[name] = _with_noise(arrays[name], samples.arrays[name], random)
        if name in whole:
            arrays[name] = np.where(whole[name], crossed[name], arrays[name])
    return Samples(arrays, source="generated")


def _whole_columns(samples: np.ndarray) -> np.ndarray:
    """True for each column of the last axis that has whole numbers alone: an id, a length, a count, also one that the
    graph takes in floating point and casts. With noise it would leave its table, or lie between two of them."""
    return np.asarray((samples == np.rint(samples)).all(tuple(range(max(samples.ndim - 1, 1)))))


def _with_noise(array: np.ndarray, samples: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each number with normal noise of half its sample's standard deviation; a constant sample stays.

    Where the columns of the last axis are of different kinds (an age, an income), it is the deviation of the column.
    """
    spread = _deviation(array, tuple(range(1, array.ndim)) if array.ndim > 1 else None)
    if array.ndim > 1 and (columns := deviation_by_kind(samples)) is not None:
        spread = columns
    return (array + NOISE * spread * random.standard_normal(array.shape)).astype(array.dtype)


def deviation_by_kind(samples: np.ndarray) -> np.ndarray | None:
    """The standard deviation of each column of the last axis where the columns are of different kinds (an age, an
    income); None where they are not, or where there are too few samples to tell."""
    if samples.ndim < 2 or len(samples) < _FEWEST:
        return None
    columns = _deviation(samples, tuple(range(samples.ndim - 1)))
    return (
        columns if columns.max(initial=0.0) > _OF_KINDS * columns[columns > 0].min(initial=np.inf) else None
    )


def _deviation(array: np.ndarray, axes: tuple[int, ...] | None) -> np.ndarray:
    """The standard deviation along the axes of the finite numbers (a bias may have minus infinity); 0 of none."""
    finite = np.isfinite(array)
    if finite.all():
        return array.std(axis=axes, keepdims=axes is not None)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column of infinities alone
        return np.nan_to_num(np.std(array, axis=axes, keepdims=axes is not None, where=finite))


def _crossed(array: np.ndarray, other: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Each row of ``array`` up to its cut, a share of the last axis, and ``other`` from there on; where a row is one
    number, that of ``other``."""
    if array.ndim == 1:
        return other
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
