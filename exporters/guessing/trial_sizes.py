"""Sizes of free dimensions with which a graph runs, found by running it: a file says that an axis is free, and does
not say of which sizes it may be (multiples of 32, 48 exactly, at least 400).

Budgets are counts of runs.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ..inputs.synthetic import SAFE_IDS, USUAL_LENGTH, generate
from .given_samples import resized

RUNS = 400
SQUARE = 3  # sizes of each other axis that are tried beside a square picture
SIZES = (2, 1, 16, 32, 64, 128, 256, 512, 1024, 48, 80, 96, 160, 224, 640, 1600, 16000)
FIRST_SIZES = (2, 1, 16, 64)  # of a first axis: rows, or steps of time
CHANNELS = (3, 1, 4)
PICTURE_SIZES = (32, 48, 64, 96, 128, 160, 224, 256, 320, 416, 480, 512, 640)
IDS = (SAFE_IDS, (1, 1), (0, 0))  # of integers: a small table takes few

Run = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]
Ids = tuple[int, int]  # the least and the largest of the integers that are drawn
Rows = Callable[[int], Mapping[str, np.ndarray]]
Place = tuple[str, int]  # an input and its axis


@dataclass(frozen=True, slots=True)
class Tried:
    """A run that succeeded: the spec with the sizes that it needs, the rows it had, what it took and what it gave.

    ``needed``: for each place whose size had to be found, why it has the size that the spec says.
    ``of_rows``: number of rows → the graph's outputs for so many rows with the same sizes; None where it does not run.
    """

    spec: ModelSpec
    rows: int
    inputs: Mapping[str, np.ndarray]
    outputs: Sequence[np.ndarray]
    needed: Mapping[Place, str]
    of_rows: Callable[[int], Sequence[np.ndarray] | None]


def try_sizes(spec: ModelSpec, run: Run, rows: int, given: Rows | None = None) -> Tried | None:
    """Run with the sizes that generated samples have, then with others, until one run succeeds; None where none does.

    A batched model is asked for ``rows`` rows. ``given``: so many rows of given samples, which are run with in the
    place of generated ones, in their own sizes first, then cut or repeated.
    """
    return _Trial(spec, run, given).at(rows)


class _Trial:
    def __init__(self, spec: ModelSpec, run: Run, given: Rows | None) -> None:
        self.spec, self.run, self.given = spec, run, given
        self.groups = _groups(spec)
        self.tensors = {tensor.name: tensor for tensor in spec.inputs}
        self.axes: list[int] = []  # of each output, in the run that succeeded
        self.arrays: Mapping[str, np.ndarray] = {}  # of the last run that succeeded

    def at(self, rows: int) -> Tried | None:
        if self.given is not None:
            arrays = self.given(rows)
            return self.at_sizes([arrays[name].shape[axis] for (name, axis), *_ in self.groups], rows)
        pictures = any(_is_picture(t, self.spec.batched) and _channel(t) is None for t in self.spec.inputs)
        usual = (
            [] if pictures else [tuple(max(self.dim(group).minimum, USUAL_LENGTH) for group in self.groups)]
        )
        sizes = itertools.chain(usual, itertools.islice(self.candidates(), RUNS))
        return next(filter(None, (self.at_sizes(one, rows) for one in sizes)), None)

    def at_sizes(self, sizes: Sequence[int], rows: int) -> Tried | None:
        chosen = self.with_sizes(sizes)
        if (outputs := self.outputs(chosen, rows)) is None:
            return None
        self.axes, arrays = [array.ndim for array in outputs], self.arrays
        spec, needed = self.bounded(sizes, rows)
        return Tried(spec, rows, arrays, outputs, needed, partial(self.outputs, chosen))

    def least(self, sizes: Sequence[int], index: int, rows: int) -> int:
        """The least size of a group that runs, the other groups having ``sizes``, as far as all larger ones run too: by
        bisection. At that size the graph runs with all integers that ``sizes`` run with: one may be a length."""

        def running_ids(size: int, of: Sequence[Ids]) -> list[Ids]:
            chosen = self.with_sizes([size if place == index else other for place, other in enumerate(sizes)])
            return [ids for ids in of if self.is_alike(self.with_ids(chosen, rows, ids))]

        all_ids = running_ids(sizes[index], (*IDS, (SAFE_IDS[1], SAFE_IDS[1])) if self.draws_ids else IDS[:1])

        def runs(size: int) -> bool:
            return len(running_ids(size, all_ids)) == len(all_ids)

        failing, running = 0, sizes[index]
        if runs(1):
            return 1
        while running - failing > 1:
            middle = (failing + running) // 2
            failing, running = (failing, middle) if runs(middle) else (middle, running)
        return running

    def least_picture(self, sizes: Sequence[int], index: int, rows: int) -> int:
        """The least usual size of a picture that runs, the other groups having ``sizes``: some run with multiples
        only."""
        smaller = (size for size in PICTURE_SIZES if size < sizes[index])
        running = (size for size in smaller if self.runs_changed(sizes, [index], lambda _, to=size: to, rows))
        return next(running, sizes[index])

    def runs_changed(
        self, sizes: Sequence[int], places: Sequence[int], change: Callable[[int], int], rows: int
    ) -> bool:
        """True if ONNX Runtime can run the ONNX file after ``change`` is applied to the sizes of some of its axes.

        Axes that must have equal sizes are one group.

        ``sizes``: the size of each group; ``places``: the numbers of the groups that change; ``rows``: of the batch.
        """
        changed = [change(size) if place in places else size for place, size in enumerate(sizes)]
        return self.is_alike(self.outputs(self.with_sizes(changed), rows))

    def is_alike(self, outputs: Sequence[np.ndarray] | None) -> bool:
        """True if ONNX Runtime ran the file (``outputs`` is not None) and each output has as many axes as in the first
        successful run. With very small sizes a Squeeze may remove an axis."""
        return outputs is not None and [array.ndim for array in outputs] == self.axes

    def dim(self, group: Sequence[Place]) -> Dim:
        return self.tensors[group[0][0]].shape[group[0][1]]

    def candidates(self) -> Iterator[tuple[int, ...]]:
        """One size for each group of places: pictures that are square, then the usual ones first."""
        if not self.groups:
            return
        lists = [self.sizes_of(group) for group in self.groups]
        pictures = [self.is_picture(group) for group in self.groups]
        for size in PICTURE_SIZES if sum(pictures) > 1 else ():
            square = (
                [size] if picture else sizes[:SQUARE] for picture, sizes in zip(pictures, lists, strict=True)
            )
            yield from itertools.product(*square)
        longest = max(map(len, lists))
        for worst in range(longest):  # the usual ones of all before the unusual of any
            for places in itertools.product(*(range(min(worst + 1, len(sizes))) for sizes in lists)):
                if max(places) == worst:
                    yield tuple(sizes[place] for sizes, place in zip(lists, places, strict=True))

    def sizes_of(self, group: Sequence[Place]) -> Sequence[int]:
        if self.is_picture(group):
            return PICTURE_SIZES
        if self.is_channel(group):
            return CHANNELS
        first = any(axis == 0 and len(self.tensors[name].shape) > 1 for name, axis in group)
        return FIRST_SIZES if first else SIZES

    def is_picture(self, group: Sequence[Place]) -> bool:
        return any(
            _is_picture(self.tensors[name], self.spec.batched) and axis in _spatial(self.tensors[name])
            for name, axis in group
        )

    def is_channel(self, group: Sequence[Place]) -> bool:
        """True if the group has the channel axis of pictures whose channels are free as well."""
        return any(
            _is_picture(self.tensors[name], self.spec.batched) and axis == _channel(self.tensors[name])
            for name, axis in group
        )

    def with_sizes(self, sizes: Sequence[int]) -> ModelSpec:
        pairs = zip(self.groups, sizes, strict=True)
        dims = {place: Dim(size, size, self.dim(group).name) for group, size in pairs for place in group}
        return _with_dims(self.spec, dims)

    def bounded(self, sizes: Sequence[int], rows: int) -> tuple[ModelSpec, dict[Place, str]]:
        """The spec with the sizes found, and the reasons: an axis is free from its size on where a larger one runs too,
        fixed where none does, of one name where only equal sizes run."""
        dims: dict[Place, Dim] = {}
        needed: dict[Place, str] = {}
        for index, (group, size) in enumerate(zip(self.groups, sizes, strict=True)):
            alike = [place for place, other in enumerate(sizes) if other == size]
            name = self.dim(group).name
            if self.runs_larger(sizes, [index], rows):
                find = self.least_picture if self.is_picture(group) else self.least
                least = find(sizes, index, rows) if size else 0
                dim = Dim(min(size, 1) if size <= 2 else least, None, name)
                why = f"{least} and larger sizes run"
            elif len(alike) > 1 and self.runs_larger(sizes, alike, rows):
                dim = Dim(min(size, 1) if size <= 2 else size, None, f"size{alike[0]}")
                why = "only equal sizes run"
            else:
                others = "2 does not" if size == 1 else f"{size + 1} and {2 * max(size, 1)} do not"
                dim, why = Dim(size, size, name), f"{size} runs, {others}"
            dims |= dict.fromkeys(group, dim)
            if dim.fixed or dim.minimum != 1 or dim.name != name:
                needed |= dict.fromkeys(group, why)
        for group, with_group, least in self.growing_together(sizes, dims, rows):
            name, axis = with_group[0]
            dims |= dict.fromkeys(group, Dim(least, None, self.dim(group).name))
            needed |= dict.fromkeys(
                group, f"{least} and larger sizes run, where axis {axis} of '{name}' grows as much"
            )
        return _with_dims(self.spec, dims), needed

    def growing_together(
        self, sizes: Sequence[int], dims: Mapping[Place, Dim], rows: int
    ) -> Iterator[tuple[list[Place], list[Place], int]]:
        """Pairs of groups of axes whose sizes can only change together, by the same number, as those of a decoder's
        mask and of its cache: (a group, the other group, the least size of the first).

        Looked for where samples are given only: generated samples draw the size of each group by itself.
        """

        def runs_shifted(pair: tuple[int, int], by: int) -> bool:
            return self.runs_changed(sizes, pair, lambda size: size + by, rows)

        fixed = [i for i, group in enumerate(self.groups) if dims[group[0]].fixed] if self.given else []
        for one, other in itertools.product(fixed, range(len(self.groups))):
            if one == other or not all(runs_shifted((one, other), by) for by in (1, 5)):
                continue
            down = max(min(sizes[one], sizes[other]) - 1, 0)
            down = down if down and runs_shifted((one, other), -down) else 0
            yield self.groups[one], self.groups[other], sizes[one] - down
            yield self.groups[other], self.groups[one], sizes[other] - down

    def runs_larger(self, sizes: Sequence[int], places: Sequence[int], rows: int) -> bool:
        larger: tuple[Callable[[int], int], ...] = (lambda size: size + 1, lambda size: 2 * max(size, 1))
        return any(self.runs_changed(sizes, places, change, rows) for change in larger)

    @property
    def draws_ids(self) -> bool:
        return self.given is None and any(
            not tensor.type.is_float and tensor.range is None and not tensor.lengths_of
            for tensor in self.spec.inputs
        )

    def outputs(self, spec: ModelSpec, rows: int) -> Sequence[np.ndarray] | None:
        """The graph's outputs for given or generated inputs; None where the graph does not run with them."""
        tried = (self.with_ids(spec, rows, ids) for ids in (IDS if self.draws_ids else IDS[:1]))
        return next((found for found in tried if found is not None), None)

    def with_ids(self, spec: ModelSpec, rows: int, ids: Ids) -> Sequence[np.ndarray] | None:
        if self.given is not None:
            arrays = _resized(spec, self.given(rows))
        else:
            _, arrays = next(generate(spec, rows, ids=ids).batches(rows if spec.batched else 0))
        try:
            outputs = self.run(arrays)
        except Exception:  # ONNX Runtime has no narrower one
            return None
        self.arrays = arrays
        return outputs


def _groups(spec: ModelSpec) -> list[list[Place]]:
    """The free places other than the batch; those of one name are one group."""
    found: dict[object, list[Place]] = {}
    for tensor in spec.inputs:
        for axis, dim in enumerate(tensor.shape):
            if not dim.fixed and not (spec.batched and axis == 0):
                found.setdefault(dim.name or (tensor.name, axis), []).append((tensor.name, axis))
    return list(found.values())


def _resized(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with the sizes that the spec fixes; lengths are at most the size of their axis."""
    first = 1 if spec.batched else 0
    found = {tensor.name: resized(arrays[tensor.name], tensor.shape, first) for tensor in spec.inputs}
    sizes = {dim.name: size for t in spec.inputs for dim, size in zip(t.shape, found[t.name].shape, strict=True)
             if dim.name}  # fmt: skip
    for tensor in spec.inputs:
        if tensor.lengths_of in sizes:
            found[tensor.name] = np.minimum(found[tensor.name], sizes[tensor.lengths_of]).astype(
                tensor.type.numpy
            )
    return found


def _with_dims(spec: ModelSpec, dims: Mapping[Place, Dim]) -> ModelSpec:
    names = {
        dim.name: dims[tensor.name, axis].name
        for tensor in spec.inputs
        for axis, dim in enumerate(tensor.shape)
        if dim.name and (tensor.name, axis) in dims
    }
    inputs = tuple(
        replace(
            t,
            shape=tuple(dims.get((t.name, axis), dim) for axis, dim in enumerate(t.shape)),
            lengths_of=names.get(t.lengths_of) or t.lengths_of,
        )
        for t in spec.inputs
    )
    return replace(spec, inputs=inputs)


def _is_picture(tensor: TensorSpec, batched: bool) -> bool:
    """True if the rows of a tensor have 1, 3 or 4 channels and a free width, or only free sizes. A cache of keys has
    its free axis before the last one."""
    return batched and tensor.type.is_float and len(tensor.shape) == 4 and bool(_spatial(tensor))


def _spatial(tensor: TensorSpec) -> tuple[int, ...]:
    for channel, spatial in ((1, (2, 3)), (3, (1, 2))):
        dim = tensor.shape[channel]
        if dim.fixed and dim.minimum in (1, 3, 4) and not tensor.shape[spatial[-1]].fixed:
            return spatial
    return () if _channel(tensor) is None else (2, 3)


def _channel(tensor: TensorSpec) -> int | None:
    """The axis of the channels, where a file states no size of a picture at all."""
    return None if any(dim.fixed for dim in tensor.shape[1:]) else 1
