"""Guesses the model.toml of a bare ONNX file from its graph, and from running it a few times."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, numpy_helper

from ...models.errors import BadFolder, BadSamples, EngineFailed
from ...models.spec.batch_axis import array_batch_back, batch_back, batch_first
from ...models.spec.datatypes import DATATYPES
from ...models.spec.filled_lengths import settled
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ...models.spec.value_range import ValueRange
from ..inputs.samples import checked_samples, read_tensors
from ..inputs.synthetic import USUAL_LENGTH
from ..onnx.reading.bounded_file import read_graph
from ..onnx.reading.graph import attribute, operations_by_name
from ..onnx.reading.signature import datatype_of, size_of
from ..proof.no_reference import DRAWS, named
from .batch_axes import are_independent, batch_axes, batch_of, paired
from .batch_size import fitting_rows, row_bytes_of_file
from .file_runs import FileRuns, file_runs
from .given_samples import Arrays, GivenSamples, laid_out
from .guess import Guess, name_for
from .lengths import lengths_in
from .trial_sizes import Rows, Run, Tried, try_sizes

_SAME_VALUES = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Gather")
_TAKEN = set(DATATYPES) - {"BF16"}  # numpy has none
_CAST = "cast it in the file"
_WAYS_OUT = {
    "STRING": "cut the operators that read text off the file (onnx.utils.extract_model), and send what they give",
    "BF16": "ONNX Runtime takes no arrays of it: cast it in the file",
}
Narrow = Callable[[GraphProto], None]
FEW = 5  # rows of a trial run: a batch of 1, 2 or 4 could be mistaken for layers or directions
MANY_CLASSES = 2  # a softmax over fewer places gives no probabilities of classes


def guess_onnx(
    path: Path, narrow: Narrow | None = None, batched: bool | None = None, samples: Arrays | None = None
) -> Guess:
    """The guessed model.toml of an ONNX file: its inputs and outputs, their kinds, and the batch.

    ``narrow`` changes the inputs and outputs of the graph that was read, where more is known of them than the file
    says; ``batched``: whether they have a batch, where that is known; ``samples``: real inputs, which the file is run
    with (`GivenSamples`). Raises BadFolder for a file that is not ONNX, that takes or gives no plain tensors, or that
    does not run; BadSamples for samples that are not the file's.
    """
    model = read_graph(path)
    if narrow is not None:
        narrow(model.graph)
    inputs, outputs, notes = _values(model.graph, path)
    axes = batch_axes(model.graph, inputs, outputs)
    places = {name: axis for name, (axis, _) in axes.items()}
    given = None if samples is None else GivenSamples.of(samples, inputs, places)
    with file_runs(path, model, [value.name for value in outputs]) as run:
        found = _Found(path, model.graph, inputs, outputs, run, axes, given)
        spec, tried = found.spec(batched)
    if batched and not spec.batched:
        raise BadFolder(f"{path}: {found.why_batched(spec)}; expected one, for max_batch_size is not 0")
    spec = replace(spec, inputs=settled(spec.inputs))
    spec, why = _with_fitting_rows(model, spec, found.why_batched(spec))
    doubts = {("", "max_batch_size"): why} if batched is None else {}
    doubts |= {(tensor.name, "shape"): why for tensor in spec.inputs if (why := _needed(tensor, tried))}
    doubts |= {(t.name, "batch_axis"): axes[t.name][1] if t.name in axes else "the axis that has as many rows"
               for t in (*spec.inputs, *spec.outputs) if t.batch_axis}  # fmt: skip
    lengths = found.lengths(spec.batched)
    doubts |= {(t.name, "lengths_of" if t.lengths_of else "range"): lengths[t.name][1] for t in spec.inputs
               if t.name in lengths}  # fmt: skip
    doubts |= {(t.name, "range"): "the graph compares it with this value" for t in spec.inputs
               if t.range and t.name not in lengths}  # fmt: skip
    spec, kinds = _with_kinds(spec, model.graph)
    if samples is not None:
        samples = laid_out(samples, spec)
        checked_samples(samples, spec)
    return Guess(spec, path.name, doubts | kinds, tuple(notes), samples=samples)


def samples_of_feed(graph: GraphProto, feed: Arrays) -> dict[str, np.ndarray]:
    """The inputs of one call of a session as samples (`GivenSamples`): each row is a sample, and a number without axes
    belongs to every one. Where the file takes no single rows, as with a fixed batch, all of the feed is one sample. A
    feed that is not the file's stays as it is."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if feed.keys() != {value.name for value in inputs}:
        return dict(feed)
    places = {name: axis for name, (axis, _) in batch_axes(graph, inputs, graph.output).items()}
    count = max((len(array) for array in feed.values() if array.ndim), default=1)
    rows = {name: array if array.ndim else np.repeat(array, count) for name, array in feed.items()}
    for samples in (rows, {name: array[None] for name, array in feed.items()}):
        with suppress(BadSamples):
            GivenSamples.of(samples, inputs, places)
            return samples
    return dict(feed)


def samples_of_files(graph: GraphProto, path: Path) -> dict[str, np.ndarray]:
    """The calls of a session in an npz file, or in the npz files of a folder, as samples (`samples_of_feed`), one after
    the other. Raises BadSamples."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    batches = [samples_of_feed(graph, read_tensors(file)) for file in files]
    if not batches or any(batch.keys() != batches[0].keys() for batch in batches):
        raise BadSamples(f"{path}: expected npz files with the same names, got {[*map(sorted, batches)]}")
    for file, batch in zip(files, batches, strict=True):
        for name, array in batch.items():
            if array.shape[1:] != batches[0][name].shape[1:]:
                raise BadSamples(
                    f"{file}: input '{name}' has rows of {list(array.shape[1:])}, and of "
                    f"{list(batches[0][name].shape[1:])} in {files[0].name}: expected one shape; pad the shorter ones"
                )
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@dataclass(frozen=True, slots=True)
class _Found:
    """The facts of an ONNX file from which model.toml is guessed. ``axes``: tensor name → (batch axis, why), for the
    tensors whose batch is not the first axis. ``given``: samples to run it with."""

    path: Path
    graph: GraphProto
    inputs: Sequence[ValueInfoProto]
    outputs: Sequence[ValueInfoProto]
    run: FileRuns
    axes: Mapping[str, tuple[int, str]]
    given: GivenSamples | None

    def spec(self, batched: bool | None) -> tuple[ModelSpec, Tried]:
        """The spec with the sizes that run. Not batched where an output has no axis of rows, or two (`_paired`).

        Raises BadFolder where no sizes were found with which the graph runs.
        """
        for axes in self.ways(batched):
            tried = self.tried(axes)
            if tried is None:
                continue
            came = list(zip(self.outputs, tried.outputs, strict=True))
            places = [batch_of(value, array, tried.rows, axes) for value, array in came]
            if axes is None or (
                None not in places
                and not paired(tried, places)
                and self.one_row_each(axes)
                and (batched or are_independent(self.graph, tried, places, self.running(axes)))
            ):
                outputs = (_output(*one, place) for one, place in zip(came, places, strict=True))
                return replace(tried.spec, outputs=tuple(outputs)), tried
        if self.given is not None:
            raise BadSamples(
                f"{self.path}: the graph does not run with the first of the samples given; ONNX Runtime said "
                f"{' '.join(self.run.failure.split())[:400]!r}"
            )
        asked = self.declared(None)
        raise BadFolder(
            f"{self.path}: the graph did not run with any sizes and values that were tried for its inputs "
            f"({', '.join(f'{t.name} {t.describe_shape()}' for t in asked.inputs)}); of the last, ONNX Runtime said "
            f"{' '.join(self.run.failure.split())[:400]!r}: give inputs with which it runs (halfeven init FILE "
            "--samples INPUTS), or write a model.toml with the sizes that it takes (docs/README.md has one)"
        )

    def one_row_each(self, axes: Mapping[str, int]) -> bool:
        """True if some of the given samples, each by itself, have a row in every output: with one row or two, the
        things that were found in a picture may be as many by chance."""
        for request in () if self.given is None else self.given.requests[:FEW]:
            try:
                came = self.run(request)
            except EngineFailed:
                return False
            if any(
                batch_of(value, array, 1, axes) is None
                for value, array in zip(self.outputs, came, strict=True)
            ):
                return False
        return True

    def ways(self, batched: bool | None) -> Iterator[Mapping[str, int] | None]:
        """The assignments of batch axes that are tried, in order: input name → axis, for the inputs whose batch is not
        the first axis; None: the model is not batched."""
        axes = {name: axis for name, (axis, _) in self.axes.items()}
        if batched is None and self.given is not None and not self.given.have_one_row(axes):
            batched = False
        if batched is None and axes and _may_batch(self.inputs, axes):
            yield axes
        if _may_batch(self.inputs, {}) if batched is None else batched:
            yield {}
        yield None

    def tried(self, axes: Mapping[str, int] | None) -> Tried | None:
        asked, run = self.declared(axes), self.running(axes)
        one = all(size_of(value, (axes or {}).get(value.name, 0)) == 1 for value in self.inputs)
        rows = 1 if one or axes is None else FEW if axes else 2
        given = self.given_rows(axes)
        variants = (try_sizes(each, run, rows, given) for each in self.with_compared(asked))
        return next(filter(None, variants), None)

    def running(self, axes: Mapping[str, int] | None) -> Run:
        """Runs the file with arrays whose batch is the first axis."""

        def run(arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
            moved = {name: axis for name, axis in (axes or {}).items() if name in arrays}
            own = {
                name: np.ascontiguousarray(array_batch_back(arrays[name], axis))
                for name, axis in moved.items()
            }
            return self.run({**arrays, **own})

        return run

    def given_rows(self, axes: Mapping[str, int] | None) -> Rows | None:
        """The given samples, so many rows of them; of a model that is not batched, the first sample."""
        given = self.given
        if given is None:
            return None
        return lambda rows: given.requests[0] if axes is None else given.rows(rows, axes)

    def with_compared(self, spec: ModelSpec) -> Iterator[ModelSpec]:
        """The spec with each value that the graph compares an input of one number with (a sample rate), then without
        any."""
        compared = compared_inputs(self.graph)
        for tensor in spec.inputs:
            is_number = all(dim.fixed and dim.minimum == 1 for dim in tensor.shape[spec.batched :])
            for number in compared.get(tensor.name, ()) if is_number else ():
                if self.given is None or self.given.has_values(tensor.name, number):
                    only = replace(tensor, range=ValueRange((number,), (number,)))
                    yield replace(spec, inputs=tuple(only if t is tensor else t for t in spec.inputs))
        yield spec

    def declared(self, axes: Mapping[str, int] | None) -> ModelSpec:
        inputs = tuple(_input(value, axes) for value in self.inputs)
        lengths = self.lengths_of(inputs)
        inputs = tuple(replace(t, lengths_of=lengths[t.name][0]) if t.name in lengths else t for t in inputs)
        return ModelSpec(name_for(self.path), inputs, (), max_batch_size=0 if axes is None else 64)

    def lengths(self, batched: bool) -> dict[str, tuple[str, str]]:
        """The inputs that are guessed to be lengths (`lengths_in`)."""
        return self.lengths_of(self.declared({} if batched else None).inputs)

    def lengths_of(self, inputs: Sequence[TensorSpec]) -> dict[str, tuple[str, str]]:
        found = lengths_in(self.graph, inputs)
        if self.given is None:
            return found
        symbols = {axis: [(value.name, place) for value in self.inputs
                          for place in range(len(value.type.tensor_type.shape.dim)) if _symbol(value, place) == axis]
                   for axis, _ in found.values()}  # fmt: skip
        return {name: one for name, one in found.items() if self.given.are_lengths(name, symbols[one[0]])}

    def why_batched(self, spec: ModelSpec) -> str:
        if spec.batched:
            return "the first axis of every tensor is taken for the batch; 0 means not batched"
        if draws := named(operations_by_name(self.graph), DRAWS):
            return f"not batched, because random numbers are drawn by {draws}: no row can be compared with itself"
        return (
            "not batched, because not every tensor has exactly one axis with a place for each row of the inputs, or a "
            "row is answered otherwise alone than among others"
        )


def _values(graph: GraphProto, path: Path) -> tuple[list[ValueInfoProto], list[ValueInfoProto], list[str]]:
    """Inputs that are no constants, outputs that are tensors of numbers, and what to tell of the others."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    for value in inputs:
        if (kind := datatype_of(value)) not in _TAKEN:
            what, way = _described(graph.input, value.name), _WAYS_OUT.get(kind, _CAST)
            raise BadFolder(
                f"{path}: input '{value.name}' is {what}, which is not taken: expected tensors of numbers or booleans; "
                + way
            )
    if bare := [value.name for value in inputs if not value.type.tensor_type.HasField("shape")]:
        raise BadFolder(f"{path}: input '{bare[0]}' has no shape in the file: write a model.toml with the shape "
                        "that it takes, or state it in the file")  # fmt: skip
    outputs = [value for value in graph.output if datatype_of(value) in _TAKEN]
    left = [value.name for value in graph.output if datatype_of(value) not in _TAKEN]
    if not inputs or not outputs:
        raise BadFolder(f"{path}: expected at least one input and one output that are tensors of numbers, got "
                        f"{[v.name for v in inputs]} and {[v.name for v in outputs]}"
                        + "".join(f"; '{name}' is {_described(graph.output, name)}" for name in left))  # fmt: skip
    notes = [f"output '{name}' is left out: {_described(graph.output, name)} is not served" for name in left]
    return inputs, outputs, notes


def _described(values: Sequence[ValueInfoProto], name: str) -> str:
    value = next(value for value in values if value.name == name)
    kind = value.type.WhichOneof("value") or "of no type"
    return f"a {datatype_of(value)} tensor" if kind == "tensor_type" else f"a {kind.removesuffix('_type')}"


def _may_batch(inputs: Sequence[ValueInfoProto], axes: Mapping[str, int]) -> bool:
    """True if the batch axis of every input has a free size or the size 1, so that rows can be batched.

    ``axes``: input name → its batch axis, for the inputs where that is not the first.
    """
    return all(
        value.type.tensor_type.shape.dim and size_of(value, axes.get(value.name, 0)) in (None, 1)
        for value in inputs
    )


def _input(value: ValueInfoProto, axes: Mapping[str, int] | None) -> TensorSpec:
    dims = [
        Dim(size, size) if (size := size_of(value, axis)) is not None else Dim(name=_symbol(value, axis))
        for axis in range(len(value.type.tensor_type.shape.dim))
    ]
    if axes is None:
        return TensorSpec(value.name, datatype_of(value), tuple(dims))
    axis = axes.get(value.name, 0)
    shape = (Dim(), *batch_first(dims, axis)[1:])
    return TensorSpec(value.name, datatype_of(value), shape, batch_axis=axis)


def _needed(tensor: TensorSpec, tried: Tried) -> str:
    own = batch_back(range(len(tensor.shape)), tensor.batch_axis)
    found = {axis: why for (name, axis), why in tried.needed.items() if name == tensor.name}
    return "; ".join(f"axis {own.index(axis)}: {why}" for axis, why in found.items())


def _symbol(value: ValueInfoProto, axis: int) -> str | None:
    name = value.type.tensor_type.shape.dim[axis].dim_param
    return name if Dim.is_name(name) and not name.startswith("unk__") else None


def _output(value: ValueInfoProto, array: np.ndarray, batch: int | None) -> TensorSpec:
    """Sizes that the file states; the rank of what came where it states none."""
    stated = value.type.tensor_type.HasField("shape")
    sizes = [size_of(value, axis) if stated else None for axis in range(array.ndim)]
    shape = [Dim() if size is None or size != came else Dim(size, size)
             for size, came in zip(sizes, array.shape, strict=True)]  # fmt: skip
    if batch is None:
        return TensorSpec(value.name, datatype_of(value), tuple(shape))
    first = (Dim(), *batch_first(shape, batch)[1:])
    return TensorSpec(value.name, datatype_of(value), first, batch_axis=batch)


def compared_inputs(graph: GraphProto) -> dict[str, list[int]]:
    """Integer inputs that are looked at for being equal to a constant, with those constants."""
    makers = {output: node for node in graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and isinstance(value := attribute(node, "value"), TensorProto):
            constants[node.output[0]] = value
    found: dict[str, list[int]] = {}
    for node in graph.node:
        for one, other in permutations(node.input, 2) if node.op_type == "Equal" else ():
            while one in makers and makers[one].op_type in _SAME_VALUES:
                one = makers[one].input[0]
            if one not in makers and one not in constants and other in constants:
                numbers = numpy_helper.to_array(constants[other])
                if numbers.dtype.kind in "iu":
                    found.setdefault(one, []).extend(int(number) for number in numbers.flat)
    return found


def _with_fitting_rows(model: ModelProto, spec: ModelSpec, why: str) -> tuple[ModelSpec, str]:
    """The spec with as many rows as a batch may reasonably have, and why it has so many."""
    if not spec.batched:
        return spec, why
    shapes: dict[str, Sequence[int]] = {}
    for tensor in spec.inputs:
        sizes = [dim.minimum if dim.fixed else max(dim.minimum, USUAL_LENGTH) for dim in tensor.shape[1:]]
        shapes[tensor.name] = batch_back([1, *sizes], tensor.batch_axis)
    rows, fewer = fitting_rows(row_bytes_of_file(model, shapes), spec.max_batch_size)
    return replace(spec, max_batch_size=rows), "; ".join(filter(None, (why, fewer)))


def _with_kinds(spec: ModelSpec, graph: GraphProto) -> tuple[ModelSpec, dict[tuple[str, str], str]]:
    """Probabilities where the last node is a Softmax over the last of two axes."""
    makers = {output: node for node in graph.node for output in node.output}
    doubts: dict[tuple[str, str], str] = {}
    outputs = []
    for tensor in spec.outputs:
        node = makers.get(tensor.name)
        while node is not None and node.op_type in ("Identity", "Cast"):
            node = makers.get(node.input[0])
        classes = tensor.shape[-1].minimum if len(tensor.shape) == 2 else 0
        if node is not None and node.op_type == "Softmax" and classes >= MANY_CLASSES and spec.batched:
            doubts[tensor.name, "kind"] = "a Softmax makes it"
            tensor = replace(tensor, kind="probabilities")
        outputs.append(tensor)
    return replace(spec, outputs=tuple(outputs)), doubts
