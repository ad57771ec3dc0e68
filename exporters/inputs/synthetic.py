"""Generated inputs: plausible ones made from the spec, and adversarial ones made from samples.

Plausible means that a model may get such inputs: pictures are pixels with its own scale, mean and deviation, ids
are in their range (small where none is known), masks are masks, lengths are no longer than what they are of, and free
dimensions that may be equal are equal.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np

from ...models.errors import BadSamples, HalfevenError
from ...models.pictures.pixels import Picture
from ...models.spec.said_by_name import has_positions, has_types, is_mask
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from .drifted_inputs import drawn_again
from .perturbed import deviation_by_kind
from .samples import MAX_BYTES, Samples

LARGEST = 4.0  # times a real sample, which no half may answer with another infinity than the original
USUAL_LENGTH = 16  # of a free dimension, where its bounds admit it
LONGEST = 4096  # tried for a free dimension, whatever its bound
SAFE_IDS = (0, 99)  # in most vocabularies, for inputs of which no range is known
UNBOUNDED = 1 << 31  # no table has as many rows: an end that says nothing
ADVERSARIAL_ROWS = 4
GENERATED = 32  # samples
# Ranges (least, largest) of generated integers, tried in this order if the model fails with the usual range.
SMALLER_IDS = ((0, 31), (0, 7), (1, 1), (0, 0))

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


def generate(
    spec: ModelSpec, count: int = GENERATED, seed: int = 0, ids: tuple[int, int] = SAFE_IDS
) -> Samples:
    """``count`` samples from names, datatypes, shapes, ranges and pictures alone; the same for the same seed.

    ``ids``: the least and the largest of integers that have no range. Raises BadSamples where they would not fit in
    memory.
    """
    random = np.random.default_rng(seed)
    size_of = _sizes(random)
    arrays = {tensor.name: _draw(tensor, spec.batched, count, size_of, random, ids) for tensor in spec.inputs}
    for tensor, longest_of in _lengths(spec, arrays, first=0 if spec.batched else 1):
        drawn = random.integers(
            1 + longest_of // 2, max(longest_of, 1), arrays[tensor.name].shape, endpoint=True
        )
        drawn[: (count + 1) // 2] = longest_of  # as most requests are: one that is asked alone has no padding
        arrays[tensor.name] = drawn.astype(tensor.type.numpy)
    return Samples(arrays, source="generated")


def adversarial(spec: ModelSpec, samples: Samples, largest: float = LARGEST) -> list[tuple[str, Arrays]]:
    """Small batches (at most 4 rows) that test the limits of half precision, each with its name.

    Zeros, ones, rows that have their own largest value everywhere (a division by their deviation divides by its eps; in
    a column of another kind the nearest value that the column has),
    real samples × 0.01 and × ``largest``, masks and lengths that leave 1 element or a few, and the shortest and longest
    sizes of free dimensions. Other integers keep values seen in samples.
    """
    real = _few_rows(spec, samples)
    return [*_rescaled(spec, samples, real, largest), *_padded(spec, real), *_resized(spec, real)]


def longest(dim: Dim, seen: int) -> int:
    """The largest size of a free dimension that is tried; ``seen``: its size in the samples."""
    return min(dim.maximum or 2 * seen, max(LONGEST, dim.minimum))


# Plausible inputs.


def _sizes(random: np.random.Generator) -> Callable[[Dim], int]:
    """Draws sizes for free dimensions. Unnamed ones share theirs: ids are as long as their mask."""
    drawn: dict[str | None, int] = {}

    def size_of(dim: Dim) -> int:
        if dim.fixed:
            return dim.minimum
        most = max(USUAL_LENGTH, dim.minimum)
        most = most if dim.maximum is None else min(most, dim.maximum)
        least = min(max(dim.minimum, 2), most)  # a size of 1 would be traced as a constant
        size = drawn.setdefault(dim.name, int(random.integers(least, most + 1)))
        return min(max(size, least), most) if dim.name is None else size

    return size_of


def _draw(
    tensor: TensorSpec,
    batched: bool,
    count: int,
    size_of: Callable[[Dim], int],
    random: np.random.Generator,
    ids: tuple[int, int],
) -> np.ndarray:
    inner = tensor.shape[1:] if batched else tensor.shape
    shape = (count, *(size_of(dim) for dim in inner))
    if (size := math.prod(shape) * tensor.type.itemsize) > MAX_BYTES:
        raise BadSamples(
            f"{count} generated samples of input '{tensor.name}' of shape {list(shape[1:])} would take {size} bytes, "
            f"more than the {MAX_BYTES} that samples may have: correct its shape, or give fewer samples of your own "
            "(--samples FILE)"
        )
    if tensor.picture is not None:
        return _pixels(Picture.of(tensor, batched), inner, shape, random)
    if tensor.type.is_float and not is_mask(tensor) and not has_types(tensor):
        return random.standard_normal(shape).astype(tensor.type.numpy)
    return _integers(tensor, shape, random, ids).astype(tensor.type.numpy)


def _integers(
    tensor: TensorSpec, shape: tuple[int, ...], random: np.random.Generator, ids: tuple[int, int]
) -> np.ndarray:
    """Integers of an input: of a mask, of a type or of positions by the input's name, else any in its range."""
    low, high = _ends(tensor, ids)
    if is_mask(tensor):
        lengths = random.integers(1, shape[-1] + 1, shape[0]) if len(shape) > 1 else None
        drawn = _prefixes(shape, lengths)
    elif tensor.datatype == "BOOL" or has_types(tensor):
        drawn = random.integers(0, 2, shape)
    elif has_positions(tensor) and len(shape) > 1:
        drawn = np.broadcast_to(np.arange(shape[-1]), shape)
    else:
        return random.integers(low, high, shape, endpoint=True)
    return drawn if tensor.range is None else np.clip(drawn, low, high)


def _ends(tensor: TensorSpec, ids: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest of generated integers, for all or for each place of the last axis.

    Of a range the part that is not negative, where it has one: numbers below zero may mean "none".
    """
    if tensor.range is None:
        is_byte = tensor.datatype == "UINT8" and ids == SAFE_IDS
        return np.array([ids[0]]), np.array([255 if is_byte else ids[1]])
    pairs = zip(tensor.range.low, tensor.range.high, strict=True)
    ends = [(max(low, 0) if high >= 0 else max(low, high - SAFE_IDS[1]), high) for low, high in pairs]
    high = [high if high < UNBOUNDED else low + SAFE_IDS[1] for low, high in ends]
    return np.array([low for low, _ in ends]), np.array(high)


def _pixels(
    picture: Picture, inner: tuple[Dim, ...], shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray:
    """The tensor's numbers for uniform pixels 0…255."""
    sizes = list(shape)
    for axis, size in zip(picture.spatial, picture.sizes, strict=True):
        if not inner[axis].fixed and size is not None:
            sizes[axis] = size
    return picture.numbers(random.integers(0, 256, sizes))


def _prefixes(shape: tuple[int, ...], lengths: np.ndarray | None) -> np.ndarray:
    """Masks [rows, …, length] whose first ``lengths[row]`` places are 1."""
    if lengths is None:
        return np.ones(shape, np.int64)
    mask = np.arange(shape[-1]) < lengths.reshape(-1, *(1,) * (len(shape) - 1))
    return np.broadcast_to(mask, shape).astype(np.int64)


# Adversarial inputs.


def _few_rows(spec: ModelSpec, samples: Samples) -> Arrays:
    rows = min(ADVERSARIAL_ROWS, spec.max_batch_size)
    _, arrays = next(samples.batches(rows))
    return arrays


def _rescaled(spec: ModelSpec, samples: Samples, real: Arrays, largest: float) -> list[tuple[str, Arrays]]:
    numbers = [tensor.name for tensor in spec.inputs if tensor.type.is_float and not is_mask(tensor)]
    changes: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "zeros": lambda array, _: np.zeros_like(array),
        "ones": lambda array, _: np.ones_like(array),
        "constant rows": partial(_constant, batched=spec.batched),
        "real × 0.01": lambda array, _: _scaled(array, 0.01),
        f"real × {largest:g}": lambda array, _: _scaled(array, largest),
    }
    return [
        (name, {**real, **{n: np.asarray(change(real[n], samples.arrays[n])) for n in numbers}})
        for name, change in changes.items()
        if numbers
    ]


def _constant(array: np.ndarray, samples: np.ndarray, batched: bool) -> np.ndarray:
    inner = tuple(range(1 if batched else 0, array.ndim))
    if array.size == 0:
        return array
    numbers = array.astype(np.float64)
    largest = np.where(np.isfinite(numbers), numbers, -np.inf).max(axis=inner, keepdims=True)
    largest = np.where(np.isneginf(largest), 0.0, largest)  # a row without any number
    if deviation_by_kind(samples) is not None:
        others = tuple(range(samples.ndim - 1))
        largest = np.clip(largest, np.fmin.reduce(samples, others), np.fmax.reduce(samples, others))
    return np.broadcast_to(largest, array.shape).astype(array.dtype)


def _scaled(array: np.ndarray, factor: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (array.astype(np.float64) * factor).astype(array.dtype)


def _padded(spec: ModelSpec, real: Arrays) -> list[tuple[str, Arrays]]:
    """Row 0 keeps one place of its mask or one of its length, the last row nearly all of them."""
    masks = {tensor.name: _pad(real[tensor.name], spec.batched) for tensor in spec.inputs if is_mask(tensor)}
    found = {name: mask for name, mask in masks.items() if mask is not None}
    for tensor, longest_of in _lengths(spec, real):
        found[tensor.name] = _rising(real[tensor.name], longest_of)
    return [("padded masks", {**real, **found})] if found else []


def _lengths(spec: ModelSpec, arrays: Arrays, first: int = 0) -> list[tuple[TensorSpec, int]]:
    """Each input of lengths, and the longest that it may have beside these arrays (`ModelSpec.ranges`)."""
    ranges = spec.ranges([arrays[tensor.name] for tensor in spec.inputs], first)
    return [
        (tensor, valid.high[0])
        for tensor, valid in zip(spec.inputs, ranges, strict=True)
        if tensor.lengths_of and valid is not None
    ]


def _rising(lengths: np.ndarray, longest_of: int) -> np.ndarray:
    """Lengths from 1 in the first row to nearly the longest in the last."""
    if lengths.ndim == 0:
        return np.ones_like(lengths)
    rising = 1 + np.arange(len(lengths)) * (longest_of - 1) // max(len(lengths), 1)
    return np.broadcast_to(rising.reshape(-1, *(1,) * (lengths.ndim - 1)), lengths.shape).astype(
        lengths.dtype
    )


def _pad(mask: np.ndarray, batched: bool) -> np.ndarray | None:
    rows = mask if batched else mask[None]
    if rows.ndim < 2 or rows.shape[-1] == 0:
        return None
    lengths = 1 + np.arange(len(rows)) * (rows.shape[-1] - 1) // len(rows)
    padded = np.where(_prefixes(rows.shape, lengths) > 0, rows, np.zeros_like(rows))
    padded[..., 0] = 1
    return padded if batched else padded[0]


def _resized(spec: ModelSpec, real: Arrays) -> list[tuple[str, Arrays]]:
    ends: dict[str, Callable[[Dim, int], int]] = {
        "shortest": lambda dim, _: max(dim.minimum, 1),
        "longest": longest,
    }
    found = []
    for name, end in ends.items():
        arrays = {tensor.name: _resize(spec, tensor, real[tensor.name], end) for tensor in spec.inputs}
        for tensor, longest_of in _lengths(spec, arrays):
            arrays[tensor.name] = np.full_like(arrays[tensor.name], longest_of)
        if any(arrays[key].shape != real[key].shape for key in real):
            found.append((name, arrays))
    return found


def _resize(
    spec: ModelSpec, tensor: TensorSpec, array: np.ndarray, end: Callable[[Dim, int], int]
) -> np.ndarray:
    """Cut or repeat along every free axis but the batch, so that each value was seen in a sample."""
    for axis, dim in enumerate(tensor.shape):
        seen = array.shape[axis]
        if not dim.fixed and not (spec.batched and axis == 0) and seen:
            array = np.take(array, np.arange(end(dim, seen)) % seen, axis=axis)
    return np.asarray(array, order="C")  # `ascontiguousarray` would give a scalar an axis


def with_smaller_integers(
    spec: ModelSpec,
    samples: Samples,
    attempt: Callable[[Samples, tuple[int, int] | None], T],
    failed: type[HalfevenError],
) -> T:
    """The result of ``attempt`` on the samples. If ``attempt`` raises ``failed`` and the samples were generated, it is
    called again on samples with smaller integers (`SMALLER_IDS`): a generated integer may be an index beyond a small
    table, a start or a size. ``attempt`` gets the samples and the range of all integers (None: as they were)."""
    try:
        return attempt(samples, None)
    except failed:
        if samples.source != "generated" or all(tensor.type.is_float for tensor in spec.inputs):
            raise
        for ids in SMALLER_IDS:
            with suppress(failed):
                return attempt(drawn_again(samples, generate(spec, ids=ids)), ids)
        raise


def range_of(ids: tuple[int, int]) -> str:
    low, high = ids
    return f"{low}" if low == high else f"{low} to {high}"


def in_range(samples: Samples, asked: ModelSpec, exact: ModelSpec) -> Samples:
    """The samples, checked against the ranges that were found; generated ones are made again within them."""
    if [tensor.range for tensor in asked.inputs] == [tensor.range for tensor in exact.inputs]:
        return samples
    if samples.source == "generated":
        return drawn_again(samples, generate(exact))
    exact.check_values([samples.arrays[tensor.name] for tensor in exact.inputs], BadSamples)
    return samples
