"""Guesses the model.toml of a bare ONNX file from its graph, and from running it a few times."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, numpy_helper

from ...models.datatypes import DATATYPES
from ...models.errors import BadFolder
from ...models.spec import Dim, ModelSpec, TensorSpec
from ...models.value_range import ValueRange
from ..foreign.graph import attribute
from ..foreign.reading import external_files, read_graph
from ..foreign.signature import datatype_of, size_of
from .guess import Guess, name_for
from .trial_sizes import Run, Tried, try_sizes

_SAME_VALUES = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Gather")
Narrow = Callable[[GraphProto], None]
MANY_CLASSES = 2  # a softmax over fewer places gives no probabilities of classes


def guess_onnx(path: Path, narrow: Narrow | None = None, batched: bool | None = None) -> Guess:
    """What is guessed of an ONNX file.

    ``narrow`` changes the inputs and outputs of the graph that was read, where more is known of them than the file
    says; ``batched``: whether they have a batch, where that is known. Raises BadFolder for a file that is not ONNX,
    that takes or gives no plain tensors, or that does not run.
    """
    model = read_graph(path)
    if narrow is not None:
        narrow(model.graph)
    inputs, outputs, notes = _values(model.graph, path)
    run = _run(path, model, [value.name for value in outputs])
    found = _Found(path, inputs, outputs, compared_inputs(model.graph), run)
    spec, tried = found.spec(_may_batch(inputs) if batched is None else batched)
    if batched and not spec.batched:
        raise BadFolder(f"{path}: {found.why_batched(spec)}; expected one, for max_batch_size is not 0")
    doubts = {("", "max_batch_size"): found.why_batched(spec)} if batched is None else {}
    doubts |= {(tensor.name, "shape"): why for tensor in spec.inputs if (why := _needed(tensor, tried))}
    doubts |= {(t.name, "range"): "the graph compares it with this value" for t in spec.inputs if t.range}
    spec, kinds = _with_kinds(spec, model.graph)
    return Guess(spec, path.name, doubts | kinds, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    inputs: Sequence[ValueInfoProto]
    outputs: Sequence[ValueInfoProto]
    compared: Mapping[str, Sequence[int]]
    run: Run

    def spec(self, batched: bool) -> tuple[ModelSpec, Tried]:
        """The spec with the sizes that run. Not batched where an output does not have one row for each of the inputs.

        Raises BadFolder where no sizes were found with which the graph runs.
        """
        asked = self.declared(batched)
        one = all(size_of(value, 0) == 1 for value in self.inputs)
        rows = 1 if one or not batched else 2
        variants = (try_sizes(each, self.run, rows) for each in self.with_compared(asked))
        tried = next(filter(None, variants), None)
        if batched and (tried is None or not _gives_rows(tried)):
            return self.spec(batched=False)
        if tried is None:
            raise BadFolder(
                f"{self.path}: the graph did not run with any sizes that were tried for its free axes "
                f"({', '.join(f'{t.name} {t.describe_shape()}' for t in asked.inputs)}): write a model.toml with the "
                "sizes that it takes (`halfeven init` shows the form), or fix them in the file"
            )
        outputs = tuple(
            _output(value, array, batched) for value, array in zip(self.outputs, tried.outputs, strict=True)
        )
        return replace(tried.spec, outputs=outputs), tried

    def with_compared(self, spec: ModelSpec) -> Iterator[ModelSpec]:
        """The spec with each value that the graph compares an input with (a sample rate), then without any."""
        for name, numbers in self.compared.items():
            for number in numbers:
                only = ValueRange((number,), (number,))
                inputs = (replace(t, range=only) if t.name == name else t for t in spec.inputs)
                yield replace(spec, inputs=tuple(inputs))
        yield spec

    def declared(self, batched: bool) -> ModelSpec:
        inputs = tuple(_input(value, batched) for value in self.inputs)
        return ModelSpec(name_for(self.path), inputs, (), max_batch_size=64 if batched else 0)

    def why_batched(self, spec: ModelSpec) -> str:
        if spec.batched:
            return "the first axis of every tensor is taken for the batch; 0 means not batched"
        return "not batched, because not every tensor has one row for each row of the inputs"


def _values(graph: GraphProto, path: Path) -> tuple[list[ValueInfoProto], list[ValueInfoProto], list[str]]:
    """Inputs that are no constants, outputs that are tensors of numbers, and what to tell of the others."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if wrong := [value.name for value in inputs if datatype_of(value) not in DATATYPES]:
        raise BadFolder(f"{path}: input '{wrong[0]}' is {_described(graph.input, wrong[0])}, which is not taken: "
                        "expected tensors of numbers or booleans")  # fmt: skip
    outputs = [value for value in graph.output if datatype_of(value) in DATATYPES]
    left = [value.name for value in graph.output if datatype_of(value) not in DATATYPES]
    if not inputs or not outputs:
        raise BadFolder(f"{path}: expected at least one input and one output that are tensors of numbers, got "
                        f"{[v.name for v in inputs]} and {[v.name for v in outputs]}")  # fmt: skip
    notes = [f"output '{name}' is left out: {_described(graph.output, name)} is not served" for name in left]
    return inputs, outputs, notes


def _described(values: Sequence[ValueInfoProto], name: str) -> str:
    value = next(value for value in values if value.name == name)
    kind = value.type.WhichOneof("value") or "of no type"
    return f"a {datatype_of(value)} tensor" if kind == "tensor_type" else f"a {kind.removesuffix('_type')}"


def _may_batch(inputs: Sequence[ValueInfoProto]) -> bool:
    """Whether every input has a first axis that is free or 1."""
    return all(value.type.tensor_type.shape.dim and size_of(value, 0) in (None, 1) for value in inputs)


def _input(value: ValueInfoProto, batched: bool) -> TensorSpec:
    dims = [
        Dim(size, size) if (size := size_of(value, axis)) is not None else Dim(name=_symbol(value, axis))
        for axis in range(len(value.type.tensor_type.shape.dim))
    ]
    shape = (Dim(), *dims[1:]) if batched else tuple(dims)
    return TensorSpec(value.name, datatype_of(value), shape)


def _needed(tensor: TensorSpec, tried: Tried) -> str:
    found = {axis: why for (name, axis), why in tried.needed.items() if name == tensor.name}
    return "; ".join(f"axis {axis}: {why}" for axis, why in found.items())


def _symbol(value: ValueInfoProto, axis: int) -> str | None:
    name = value.type.tensor_type.shape.dim[axis].dim_param
    return name if name.isidentifier() and not name.startswith("unk__") else None


def _output(value: ValueInfoProto, array: np.ndarray, batched: bool) -> TensorSpec:
    """Sizes that the file states; the rank of what came where it states none."""
    stated = value.type.tensor_type.HasField("shape")
    sizes = [size_of(value, axis) if stated else None for axis in range(array.ndim)]
    shape = [Dim() if size is None or size != came else Dim(size, size)
             for size, came in zip(sizes, array.shape, strict=True)]  # fmt: skip
    return TensorSpec(value.name, datatype_of(value), (Dim(), *shape[1:]) if batched else tuple(shape))


def _gives_rows(tried: Tried) -> bool:
    return all(array.ndim > 0 and len(array) == tried.rows for array in tried.outputs)


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


def _run(path: Path, model: ModelProto, names: Sequence[str]) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    beside = external_files(path, model)
    try:
        source = path if beside else model.SerializeToString()
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BadFolder(f"{path}: ONNX Runtime cannot load it: {str(error)[:500]}") from error

    def run(arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        return [np.asarray(array) for array in session.run(list(names), dict(arrays))]

    return run


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
