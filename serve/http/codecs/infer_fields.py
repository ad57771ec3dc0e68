"""The JSON part of an infer request, field by field, checked against the model. Refusals in Triton's words."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from ....models.errors import BadRequest
from ....models.spec.datatypes import Datatype
from ....models.spec.spec import ModelSpec, TensorSpec, names_fault
from ..error_mapping import UnreadableTensor
from ..limits.request_limits import DEFAULTS
from .infer_parameters import flag, parameters_of
from .json_numbers import show

_INT64_MAX = DEFAULTS.shape_elements
_SOURCES = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"


class DeclaredInput(NamedTuple):
    """One input as the JSON declares it: checked, but not yet read. ``position`` is its place in the JSON."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    elements: int
    position: int
    binary_size: int | None
    data: Any

    @property
    def dtype(self) -> np.dtype:
        return self.datatype.numpy


def read_inputs(
    spec: ModelSpec, message: Mapping[str, Any], as_triton: bool
) -> tuple[int, list[DeclaredInput]]:
    """The rows and the inputs in the spec's order; ``spec`` is `ModelSpec.as_called`. Raises BadRequest."""
    entries = _objects(message, "inputs")
    _check_names(spec, [entry["name"] for entry in entries])
    places = {entry["name"]: (place, entry) for place, entry in enumerate(entries)}
    declared = [_declared(spec, tensor, as_triton, *places[tensor.name]) for tensor in spec.inputs]
    _check_equal_sizes(spec, declared)
    return (declared[0].shape[spec.inputs[0].batch_axis] if spec.batched else 1), declared


def read_outputs(
    spec: ModelSpec, message: Mapping[str, Any], as_triton: bool
) -> Iterator[tuple[int, bool, int]]:
    """(index, binary, best classes or 0) of each output asked for; all where none is named. Raises BadRequest."""
    binary = flag(parameters_of(message, "the request"), "binary_data_output", False)
    places = {tensor.name: index for index, tensor in enumerate(spec.outputs)}
    asked = _objects(message, "outputs") if message.get("outputs") else [{"name": name} for name in places]
    seen: set[str] = set()
    for entry in asked:
        name = entry["name"]
        if name in seen:
            raise BadRequest(f"output '{name}' already exists in request")
        if name not in places:
            raise BadRequest(
                f"unexpected inference output '{name[:80]}' for model '{spec.name}'; it has {list(places)}"
            )
        seen.add(name)
        yield places[name], *_output_form(spec.outputs[places[name]], entry, binary, as_triton)


def _output_form(
    tensor: TensorSpec, entry: Mapping[str, Any], binary: bool, as_triton: bool
) -> tuple[bool, int]:
    """The form of one output: True for binary, False for JSON, and the number of classes (0: values as they are)."""
    parameters = parameters_of(entry, f"output '{tensor.name}'")
    if "shared_memory_region" in parameters:
        raise BadRequest(_no_shared_memory(f"output '{tensor.name}'"))
    binary = flag(parameters, "binary_data", binary)
    classes = _classes(tensor, parameters, as_triton)
    if as_triton and not binary and not classes and _is_half(tensor):
        raise BadRequest(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for "
            f"output '{tensor.name}'"
        )
    return binary, classes


def _classes(tensor: TensorSpec, parameters: Mapping[str, Any], as_triton: bool) -> int:
    most = parameters.get("classification", 0)
    if type(most) is not int or not 0 <= most < 2**31:
        raise BadRequest(
            f"Unable to parse 'classification' of output '{tensor.name}': expected how many of the best classes "
            f"are wanted, got {str(most)[:40]!r}"
        )
    if most and (tensor.datatype == "BOOL" or (as_triton and _is_half(tensor))):
        raise BadRequest(
            f"class result not available for output '{tensor.name}' due to unsupported type '{tensor.datatype}'"
        )
    return most


def _is_half(tensor: TensorSpec) -> bool:
    return tensor.datatype in ("FP16", "BF16")


def _no_shared_memory(place: str) -> str:
    return f"{place}: shared memory is not offered; send and receive binary tensors in the body"


def _objects(message: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list under ``key``: objects that each have a name."""
    entries = message.get(key)
    if not isinstance(entries, list) or not entries:
        came = show(entries) if key in message else "no such key"
        raise BadRequest(f"Unable to parse '{key}': expected a list of tensors under '{key}', got {came}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise BadRequest(f"Unable to parse '{key}': {key}[{index}] must be an object with a 'name'")
    return entries


def _check_names(spec: ModelSpec, came: Sequence[str]) -> None:
    wanted = [tensor.name for tensor in spec.inputs]
    if sorted(came) == sorted(wanted):
        return
    name, times = Counter(came).most_common(1)[0]
    if times > 1:
        raise BadRequest(f"input '{name[:80]}' already exists in request for model '{spec.name}'")
    raise BadRequest(names_fault(spec.name, wanted, came))


def _declared(
    spec: ModelSpec, tensor: TensorSpec, as_triton: bool, position: int, entry: dict[str, Any]
) -> DeclaredInput:
    shape = _shape(tensor.name, entry.get("shape"))
    _check_datatype(spec, tensor, entry.get("datatype"))
    itemsize = tensor.type.itemsize
    # The check comes before anything is multiplied by machine: numpy wraps where Python does not. The product is
    # compared as it grows: to multiply a hundred thousand sizes takes seconds.
    if any(product > _INT64_MAX for product in accumulate((max(size, 1) for size in shape), mul)):
        raise BadRequest(
            f"the shape {_shortened(shape)} of input '{tensor.name}' causes total element count to "
            f"exceed maximum size of {_INT64_MAX}"
        )
    # numpy counts the bytes as if a size of 0 were 1, too.
    if prod(max(size, 1) for size in shape) * itemsize > _INT64_MAX:
        raise BadRequest(f"byte size overflow for input '{tensor.name}': the shape is {_shortened(shape)}")
    count = prod(shape)
    _check_shape(spec, tensor, shape, spec.max_batch_size if as_triton else spec.max_request_rows)
    parameters = parameters_of(entry, f"input '{tensor.name}'")
    size = _binary_size(spec, tensor, entry, parameters)
    if size is None and as_triton and _is_half(tensor):
        raise BadRequest(
            f"receiving {tensor.datatype} data via JSON is not supported. Please use the binary data format for "
            f"input '{tensor.name}'"
        )
    if size is not None and size != count * itemsize:
        raise BadRequest(
            f"input byte size mismatch for input '{tensor.name}' for model '{spec.name}'. "
            f"Expected {count * itemsize}, got {size}"
        )
    return DeclaredInput(tensor.name, tensor.type, shape, count, position, size, entry.get("data"))


def _shape(name: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list):
        raise BadRequest(f"Unable to parse 'shape': input '{name}' must have a list of sizes there")
    if wrong := [size for size in shape if type(size) is not int or size < 0]:
        raise UnreadableTensor(
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer: "
            f"input '{name}' came with the size {show(wrong[0])}"
        )
    return tuple(shape)


def _check_datatype(spec: ModelSpec, tensor: TensorSpec, came: object) -> None:
    if came == tensor.datatype:
        return
    said = "missing" if came is None else f"'{came[:40]}'" if isinstance(came, str) else show(came)
    text = f"inference input '{tensor.name}' data-type is {said}, but model '{spec.name}' expects "
    way_out = "; BYTES tensors are not offered: send numbers (token ids, pixels)" if came == "BYTES" else ""
    raise BadRequest(f"{text}'{tensor.datatype}'{way_out}")


def _shortened(shape: Sequence[int]) -> str:
    """The shape for a message, at most 80 characters of it: it may have very many sizes."""
    return str(list(shape[:80]))[:80]


def _check_shape(spec: ModelSpec, tensor: TensorSpec, shape: tuple[int, ...], most_rows: int) -> None:
    if len(shape) == len(tensor.shape):
        if spec.batched and (rows := shape[tensor.batch_axis]) > most_rows:
            axis = f" on axis {tensor.batch_axis}" if tensor.batch_axis else ""
            raise BadRequest(
                f"inference request batch-size must be <= {most_rows} for '{spec.name}': input "
                f"'{tensor.name}' has {rows} rows{axis}; split the request"
            )
        if all(dim.admits(size) for dim, size in zip(tensor.shape, shape, strict=True)):
            return
    raise BadRequest(
        f"unexpected shape for input '{tensor.name}' for model '{spec.name}'. "
        f"Expected {tensor.describe_shape()}, got [{','.join(map(str, shape))[:80]}]"
        + (f" (axis {tensor.batch_axis} is the batch)" if tensor.batch_axis else "")
        + tensor.why_not_empty(shape, spec.batched)
        + "."
    )


def _binary_size(
    spec: ModelSpec, tensor: TensorSpec, entry: Mapping[str, Any], parameters: Mapping[str, Any]
) -> int | None:
    """The declared ``binary_data_size``, or None where the numbers are in the JSON."""
    sources = ("data" in entry, "binary_data_size" in parameters, "shared_memory_region" in parameters)
    if sum(sources) != 1:
        raise BadRequest(
            f"Input must set only one of the following fields: {_SOURCES}. Input '{tensor.name}' for model "
            f"'{spec.name}' sets {sum(sources)} of them"
        )
    if sources[2]:
        raise BadRequest(_no_shared_memory(f"input '{tensor.name}'"))
    if sources[0]:
        return None
    size = parameters["binary_data_size"]
    if type(size) is not int or size < 0:
        raise BadRequest(
            f"Unable to parse 'binary_data_size' of input '{tensor.name}': got {str(size)[:40]!r}"
        )
    return size


def _check_equal_sizes(spec: ModelSpec, declared: Sequence[DeclaredInput]) -> None:
    """All inputs have the same batch, and dimensions of one name have one size."""
    sizes: dict[str, tuple[int, str]] = {}
    for tensor, item in zip(spec.inputs, declared, strict=True):
        for axis, (dim, size) in enumerate(zip(tensor.shape, item.shape, strict=True)):
            key = "(batch)" if spec.batched and axis == tensor.batch_axis else dim.name
            known, where = sizes.setdefault(key, (size, item.name)) if key else (size, "")
            if known != size:
                raise BadRequest(
                    f"input '{item.name}' for model '{spec.name}': axis {axis} ({key}) is {size}, but input "
                    f"'{where}' has {known} there; they must be equal"
                )


MAX_VALUES = DEFAULTS.ranked_results
MAX_SCORES = DEFAULTS.ranked_scores


def classify(array: np.ndarray, tensor: TensorSpec, most: int, batched: bool) -> tuple[list[int], list[str]]:
    """The best K classes of an output, as ``value:index[:label]``: shape ``[batch, k]`` (``[k]`` where not batched), k
    = min(most, classes), and its elements in a row.

    Source: Triton's classification extension. Values have six decimals where they are fractions, as C++ ``to_string``
    writes them; the best comes first, equal ones in the order of their index, NaN last.

    A class is an element of the output's row, whatever its shape. Raises BadRequest beyond `MAX_VALUES` or
    `MAX_SCORES`.
    """
    rows = array.shape[0] if batched else 1
    classes = prod(array.shape[1:] if batched else array.shape)
    count = min(most, classes)
    if rows * count > MAX_VALUES:
        raise BadRequest(
            f"output '{tensor.name}': the {count} best of {rows} rows are {rows * count} classification results; "
            f"at most {MAX_VALUES} are given in one answer: ask for fewer, or take the scores"
        )
    if rows * classes > MAX_SCORES:
        raise BadRequest(
            f"output '{tensor.name}': class result not available for {rows * classes} elements; at most "
            f"{MAX_SCORES} are ranked for one answer: send fewer rows, or take the scores"
        )
    scores = array.reshape(rows, classes)
    if tensor.type.is_float:
        scores = scores.astype(np.float64)
    order = _best(scores, count)
    text = _texts(np.take_along_axis(scores, order, 1).ravel(), order.ravel(), tensor.labels)
    return [rows, count] if batched else [count], text


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest of each row, descending: int64 [rows, count]."""
    ranked = np.where(np.isnan(scores), -np.inf, scores) if scores.dtype.kind == "f" else scores
    best = [_best_of(row, count) for row in ranked] if count else []
    return np.array(best, np.int64).reshape(len(scores), count)


def _best_of(row: np.ndarray, count: int) -> np.ndarray:
    """Only the elements that reach the ``count``-th largest value are sorted."""
    least = np.partition(row, -count)[-count]
    near = np.flatnonzero(row >= least)
    # Descending with ties by index, for unsigned integers too: an ascending stable order of the mirrored candidates.
    return near[::-1][np.argsort(row[near[::-1]], kind="stable")[::-1]][:count]


def _texts(values: np.ndarray, indices: np.ndarray, labels: Sequence[str]) -> list[str]:
    form = "%f:%d" if values.dtype.kind == "f" else "%d:%d"
    pairs = [form % pair for pair in zip(values.tolist(), indices.tolist(), strict=True)]
    if not labels:
        return pairs
    names = [f":{labels[index]}" if index < len(labels) else "" for index in indices.tolist()]
    return [pair + name for pair, name in zip(pairs, names, strict=True)]


def bytes_tensor(texts: Sequence[str]) -> bytes:
    """Text as BYTES elements on the binary wire: a little-endian u32 length before each."""
    encoded = [text.encode() for text in texts]
    return b"".join([part for item in encoded for part in (len(item).to_bytes(4, "little"), item)])
