"""Samples that are given with a bare ONNX file: what the file is run with, and their layout as samples.safetensors.

Of an input, an array with as many axes as the file has for it holds one row for each sample; an array with one axis
more holds the whole input for each sample. A batch as the file takes it, with its rows on
another axis, is known by its sizes. All may stand in one file: pictures [n, 3, h, w] beside a threshold that
has no axes [n].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ValueInfoProto

from ...models.errors import BadSamples
from ...models.spec.batch_axis import array_batch_back, array_batch_first, batch_back, batch_first
from ...models.spec.datatypes import name_of
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ...models.store.store import Version
from ..inputs.samples import TARGET, Samples, as_fp32, check_in_fp32, load_samples, stored_samples
from ..onnx.reading.signature import datatype_of, size_of

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class GivenSamples:
    """``requests``: the inputs of each sample, in the axes of the file."""

    requests: Sequence[Arrays]

    @classmethod
    def of(cls, arrays: Arrays, inputs: Sequence[ValueInfoProto], axes: Mapping[str, int]) -> "GivenSamples":
        """``axes``: input name → its batch axis, where that is not the first. Raises BadSamples naming the tensor."""
        _check_names(
            [name for name in arrays if not name.startswith(TARGET)], [value.name for value in inputs]
        )
        columns = {
            value.name: _column(arrays[value.name], value, axes.get(value.name, 0)) for value in inputs
        }
        counts = {name: len(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1 or not min(counts.values()):
            raise BadSamples(f"expected as many samples of every input, and at least one, got {counts}")
        rows = zip(*columns.values(), strict=True)
        return cls([dict(zip(columns, row, strict=True)) for row in rows])

    def have_one_row(self, axes: Mapping[str, int]) -> bool:
        """True if a batch axis of 1 is there in every input of a sample. ``axes``: as in `of`."""
        return all(array.shape[axes.get(name, 0) :][:1] == (1,) for name, array in self.requests[0].items())

    def rows(self, count: int, axes: Mapping[str, int]) -> Arrays:
        """The first samples together, as often as it needs: ``count`` rows where each sample has one row, the batch
        in front."""
        chosen = [self.requests[index % len(self.requests)] for index in range(count)]
        return {name: np.concatenate([array_batch_first(one[name], axes.get(name, 0)) for one in chosen])
                for name in self.requests[0]}  # fmt: skip

    def has_values(self, name: str, number: int) -> bool:
        """True if an input has this number in every sample."""
        return all(bool((request[name] == number).all()) for request in self.requests)

    def are_lengths(self, name: str, of: Sequence[tuple[str, int]]) -> bool:
        """True if the values of an input are from 1 to the size of each of these (input, axis)."""
        return all(
            bool(((request[name] >= 1) & (request[name] <= request[other].shape[axis])).all())
            for request in self.requests
            for other, axis in of
        )


def judging_samples(version: Version, given: Path | None) -> Samples:
    """The samples in the file ``given``, all of which judge, or the version's own; of an ONNX file also in its own
    layout. Raises as `load_samples` does."""
    if given is None:
        return stored_samples(version)
    if not version.has("original.onnx"):
        return replace(load_samples(given, version.spec()), all_judge=True)
    return replace(load_samples(given, version.spec(), layout=laid_out), all_judge=True)


def laid_out(arrays: Arrays, spec: ModelSpec) -> dict[str, np.ndarray]:
    """The arrays as samples.safetensors has them, for the spec of an ONNX file. What has that layout stays as it is, as
    do targets, and what no input could be."""
    found = dict(arrays)
    inputs = [one for one in spec.inputs if one.name in arrays and arrays[one.name].ndim]
    count = next((len(arrays[one.name]) for one in inputs if arrays[one.name].ndim > len(one.shape)), 0)
    for tensor in inputs:
        own = batch_back(tensor.shape, tensor.batch_axis)
        sizes = [dim.minimum if dim.fixed else None for dim in own]
        array, axes = _rows_first(arrays[tensor.name], sizes, tensor.batch_axis), len(tensor.shape)
        found[tensor.name] = array
        if not spec.batched and array.ndim == axes:
            place = _place_of_rows(array, tensor, count)
            found[tensor.name] = np.expand_dims(np.moveaxis(array, place, 0), 1 + place)
        elif spec.batched and array.ndim == axes + 1 and array.shape[1 + tensor.batch_axis] == 1:
            found[tensor.name] = array.squeeze(1 + tensor.batch_axis)
    return found


def _rows_first(array: np.ndarray, sizes: Sequence[int | None], axis: int) -> np.ndarray:
    """The array with a row for each sample in front. One batch as the file takes it has its rows on axis ``axis``; it
    is taken for such a batch where it has the file's own ``sizes`` (None: free), and has them in no other order."""
    if not axis or array.ndim != len(sizes):
        return array
    free = [None if place == axis else size for place, size in enumerate(sizes)]
    in_front, own = (
        all(size in (None, has) for size, has in zip(order, array.shape, strict=True))
        for order in (batch_first(free, axis), free)
    )
    return array_batch_first(array, axis) if own and not in_front else array


def _place_of_rows(array: np.ndarray, tensor: TensorSpec, count: int) -> int:
    """The axis that counts the samples, of an array that has as many axes as the input: the first one, or the only one
    that has ``count`` where the file has 1 or a free size."""
    if len(array) == count:
        return 0
    places = [
        axis
        for axis, (size, dim) in enumerate(zip(array.shape, tensor.shape, strict=True))
        if size == count and (not dim.fixed or dim.minimum == 1)
    ]
    return places[0] if len(places) == 1 else 0


def resized(array: np.ndarray, shape: Sequence[Dim], first: int) -> np.ndarray:
    """The array with the sizes that ``shape`` fixes, cut or repeated from axis ``first`` on."""
    for axis, dim in enumerate(shape):
        size = array.shape[axis]
        if axis >= first and dim.fixed and dim.minimum != size and size:
            array = np.take(array, np.arange(dim.minimum) % size, axis=axis)
    return array


def _check_names(came: Sequence[str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in came]
    unknown = [name for name in came if name not in wanted]
    if missing or unknown:
        raise BadSamples(
            f"expected an array for each input of the file {list(wanted)}, got {sorted(came)}: missing {missing}, "
            f"unknown {unknown}"
        )


def _column(array: np.ndarray, value: ValueInfoProto, batch_axis: int) -> Sequence[np.ndarray]:
    """The input for each sample. Raises BadSamples."""
    wanted = datatype_of(value)
    array = as_fp32(array, wanted or "")
    check_in_fp32(value.name, array, wanted or "")
    came = name_of(array.dtype)
    if came != wanted:
        raise BadSamples(f"tensor '{value.name}': expected datatype {wanted}, got {came}")
    axes = len(value.type.tensor_type.shape.dim)
    sizes = [size_of(value, axis) for axis in range(axes)]
    array = _rows_first(array, sizes, batch_axis)
    own = "[" + ",".join("?" if size is None else str(size) for size in sizes) + "]"
    if array.ndim == axes + 1:
        column = list(array)
    elif array.ndim == axes and axes:
        column = [array_batch_back(array[row : row + 1], batch_axis) for row in range(len(array))]
    else:
        raise BadSamples(
            f"tensor '{value.name}': expected {axes + 1} axes, samples first, for the file's {own}"
            + (f", or {axes} with one row for each sample" if axes else "")
            + f"; got {array.ndim}"
        )
    fits = all(size in (None, has) for one in column[:1] for size, has in zip(sizes, one.shape, strict=True))
    if not fits:
        raise BadSamples(
            f"tensor '{value.name}': a sample has the sizes {list(column[0].shape)}, the file takes {own} (? is free)"
        )
    return column
