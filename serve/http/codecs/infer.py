"""Open Inference Protocol V2 infer: bytes in, arrays out, and back. No HTTP here.

Source: Open Inference Protocol "Inference", Triton's binary tensor data extension; the refusals carry
Triton's words, because clients match on them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from ....models.errors import BadRequest, EngineFailed
from ....models.spec.batch_axis import array_batch_back, array_batch_first
from ....models.spec.spec import ModelSpec, TensorSpec
from ...batching.interface import NO_TERMS, Terms
from ..error_mapping import UnreadableTensor
from .infer_fields import DeclaredInput, bytes_tensor, classify, read_inputs, read_outputs
from .infer_parameters import Wishes, read_wishes
from .json_numbers import MANY, PIECE, array_of, dump_flat, parse_tensors, writable

_HEADER_LENGTH = re.compile(r"[0-9]{1,12}")
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_PLANS, _PLAN_BYTES = 256, 4096  # how many request headers are remembered, and how long one may be


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """``index`` into the spec's outputs; ``binary`` or JSON; how many best ``classes`` (0: the output as it is)."""

    index: int
    binary: bool
    classes: int = 0


class InferRequest(NamedTuple):
    """A checked request. Binary ``arrays`` are read-only views of the body, possibly unaligned.

    Their first axis is the batch, wherever the request had it (then they may be copies).
    ``rows`` is the batch size, 1 where the model is not batched; ``nan_as`` is how JSON writes what is not finite.
    """

    id: str | None
    arrays: list[np.ndarray]
    rows: int
    outputs: tuple[RequestedOutput, ...]
    terms: Terms = NO_TERMS
    nan_as: str = "token"


class InferResponse(NamedTuple):
    """``header_length`` is the length of the JSON part, None where the body is JSON alone."""

    body: bytes
    header_length: int | None


class _Plan(NamedTuple):
    """The meaning of one JSON header where every input is binary: everything but the numbers."""

    places: tuple[tuple[tuple[int, ...], np.dtype, int], ...]  # shape, dtype, offset in the body
    length: int
    rows: int
    outputs: tuple[RequestedOutput, ...]
    terms: Terms
    nan_as: str


class _Head(NamedTuple):
    """The meaning of a request's fields, with every input declared and none read."""

    id: str | None
    wishes: Wishes
    rows: int
    declared: list[DeclaredInput]
    outputs: tuple[RequestedOutput, ...]


class InferCodec:
    """Reads requests for one model and writes its answers.

    A client's JSON header is the same for every request of one shape, so its meaning is remembered, and such a request
    costs one dictionary look-up. ``as_triton``: the differences from Triton that could break a client are left out
    (``--triton-strict``; the table with the reasons is in ``docs/protocol.md``).
    """

    def __init__(self, spec: ModelSpec, as_triton: bool = False) -> None:
        self.spec = spec
        self._called = spec.as_called()
        self._axes_in = [tensor.batch_axis for tensor in spec.inputs]
        self._moves = any(self._axes_in)
        self._axes_out = [tensor.batch_axis for tensor in spec.outputs]
        self._as_triton = as_triton
        self._output_dtypes = [tensor.type.numpy for tensor in spec.outputs]
        self._all_binary = tuple(RequestedOutput(i, True) for i in range(len(spec.outputs)))
        self._all_json = tuple(RequestedOutput(i, False) for i in range(len(spec.outputs)))
        self._heads: dict[tuple[Any, ...], bytes] = {}
        self._plans: dict[bytes, _Plan] = {}
        self._has_bounds = any(
            tensor.range is not None or tensor.lengths_of or tensor.datatype == "BOOL"
            for tensor in spec.inputs
        )

    def read(self, body: bytes, header_length: str | None = None) -> InferRequest:
        """Read a request body; ``header_length`` is the Inference-Header-Content-Length, as it came.

        Raises BadRequest naming the tensor, what was expected and what came.
        """
        return self._checked(self._read(body, header_length))

    def read_message(self, message: Mapping[str, Any], tensors: Sequence[bytes]) -> InferRequest:
        """Read a request of another wire: the JSON's fields, and each input's bytes in the order of its ``inputs``.

        Raises as `read` does.
        """
        head = self._understood(message)
        arrays = [np.ndarray(item.shape, item.dtype, tensors[item.position]) for item in head.declared]
        return self._checked(InferRequest(head.id, arrays, head.rows, head.outputs, *head.wishes))

    def _checked(self, request: InferRequest) -> InferRequest:
        if self._moves:
            request = request._replace(arrays=list(map(array_batch_first, request.arrays, self._axes_in)))
        if self._has_bounds:
            self.spec.check_values(request.arrays)
        return request

    def _read(self, body: bytes, header_length: str | None) -> InferRequest:
        if header_length is None:
            return self._read_fresh(body, len(body), False)
        head = _head_size(header_length, len(body))
        if head == 0:
            return self._read_raw(body)
        plan = self._plans.get(body[:head])
        if plan is None or plan.length != len(body):
            return self._read_fresh(body, head, head <= _PLAN_BYTES)
        arrays = [np.ndarray(shape, dtype, body, offset) for shape, dtype, offset in plan.places]
        return InferRequest(None, arrays, plan.rows, plan.outputs, plan.terms, plan.nan_as)

    def _read_fresh(self, body: bytes, head: int, remember: bool) -> InferRequest:
        text = body[:head]
        message = parse_tensors(text)
        if not isinstance(message, dict):
            raise BadRequest('an inference request is a JSON object: {"inputs": [...]}')
        id, wishes, rows, declared, outputs = self._understood(message)
        places = self._places(declared, head, len(body))
        arrays = [
            np.ndarray(item.shape, item.dtype, body, place)
            if place is not None
            else _from_json(item, self.spec.name)
            for item, place in zip(declared, places, strict=True)
        ]
        if remember and id is None and None not in places:
            self._remember(text, declared, places, (len(body), rows, outputs, wishes.terms, wishes.nan_as))
        return InferRequest(id, arrays, rows, outputs, *wishes)

    def _understood(self, message: Mapping[str, Any]) -> _Head:
        id = message.get("id")
        if id is not None and not isinstance(id, str):
            raise BadRequest(f"the request's 'id' must be a string, got {type(id).__name__}")
        wishes = read_wishes(message, id)
        rows, declared = read_inputs(self._called, message, self._as_triton)
        return _Head(id, wishes, rows, declared, self._asked(message))

    def _asked(self, message: Mapping[str, Any]) -> tuple[RequestedOutput, ...]:
        """The outputs that the request names; all of them where it names none, as most do."""
        if message.get("outputs") is None and message.get("parameters") is None and not self._as_triton:
            return self._all_json
        asked = tuple(RequestedOutput(*item) for item in read_outputs(self.spec, message, self._as_triton))
        return self._all_binary if asked == self._all_binary else asked

    def _places(self, declared: Sequence[DeclaredInput], head: int, length: int) -> list[int | None]:
        """The offset of each binary tensor in the body (None for others): one after the other, in the JSON's order."""
        places: list[int | None] = [None] * len(declared)
        cursor = head
        for index, item in sorted(enumerate(declared), key=lambda pair: pair[1].position):
            if item.binary_size is None:
                continue
            if cursor + item.binary_size > length:
                missing = cursor + item.binary_size - length
                raise BadRequest(
                    f"unexpected size for input '{item.name}', expecting {missing} additional bytes "
                    f"for model '{self.spec.name}'"
                )
            places[index] = cursor
            cursor += item.binary_size
        if cursor != length:
            raise BadRequest(
                f"unexpected additional input data for model '{self.spec.name}': {length - cursor} bytes "
                "follow the last tensor that the JSON declares"
            )
        return places

    def _remember(
        self,
        text: bytes,
        declared: Sequence[DeclaredInput],
        places: Sequence[int | None],
        rest: tuple[int, int, tuple[RequestedOutput, ...], Terms, str],
    ) -> None:
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        where = tuple(
            (item.shape, item.dtype, place or 0) for item, place in zip(declared, places, strict=True)
        )
        self._plans[text] = _Plan(where, *rest)

    def _read_raw(self, body: bytes) -> InferRequest:
        """A header length of 0: the body is the one input's bytes, batch 1; all outputs come back binary."""
        spec = self._called
        if len(spec.inputs) != 1:
            raise BadRequest(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} "
                f"inputs in '{spec.name}' model configuration"
            )
        array = np.ndarray(_raw_shape(spec, len(body)), spec.inputs[0].type.numpy, body)
        return InferRequest(None, [array], 1, self._all_binary)

    def is_quick_to_write(self, request: InferRequest, outputs: Sequence[np.ndarray]) -> bool:
        """True if another thread need not write the answer: binary outputs that are not ranked are only copied."""
        if request.outputs is self._all_binary:
            return True
        return (
            sum(outputs[one.index].size for one in request.outputs if one.classes or not one.binary) <= MANY
        )

    def write(
        self,
        request: InferRequest,
        outputs: Sequence[np.ndarray],
        version: str,
        parameters: Mapping[str, Any],
    ) -> InferResponse:
        """Write the asked outputs (``outputs`` is all of them, in the spec's order, the batch first).

        Where all are binary the JSON has nothing but the shapes: it is remembered like a request's.
        """
        if request.outputs is not self._all_binary or request.id is not None:
            return self._write_fresh(request, outputs, version, parameters)
        for index, array in enumerate(outputs):
            if array.dtype != self._output_dtypes[index]:
                raise EngineFailed(_wrong_dtype(self.spec.outputs[index], array))
        key = (version, *parameters.values(), *[array.shape for array in outputs])
        text = self._heads.get(key)
        if text is None:
            response = self._write_fresh(request, outputs, version, parameters)
            if response.header_length is not None:
                if len(self._heads) >= _PLANS:
                    self._heads.clear()
                self._heads[key] = response.body[: response.header_length]
            return response
        chunks = map(_raw_bytes, map(array_batch_back, outputs, self._axes_out), self.spec.outputs)
        return InferResponse(b"".join((text, *chunks)), len(text))

    def _write_fresh(
        self,
        request: InferRequest,
        outputs: Sequence[np.ndarray],
        version: str,
        parameters: Mapping[str, Any],
    ) -> InferResponse:
        entries, chunks = self.entries(request, outputs)
        message = {"model_name": self.spec.name, "model_version": version, "parameters": parameters}
        if request.id is not None:
            message = {"id": request.id, **message}
        message["outputs"] = entries
        large = any(
            isinstance(data := entry.get("data"), np.ndarray) and data.size > PIECE for entry in entries
        )
        text = b"" if large else orjson.dumps(message, option=_NUMPY)
        if large or b"null" in text:  # orjson's word for a number that is not finite
            text = _with_nan(message, request.nan_as)
        if not chunks:
            return InferResponse(text, None)
        return InferResponse(b"".join((text, *chunks)), len(text))

    def entries(
        self, request: InferRequest, outputs: Sequence[np.ndarray]
    ) -> tuple[list[dict[str, Any]], list[memoryview | bytes]]:
        """The fields of each asked output, and the bytes of the binary ones that have any, in the same order."""
        entries: list[dict[str, Any]] = []
        chunks: list[memoryview | bytes] = []
        for asked in request.outputs:
            index = asked.index
            tensor, array = self.spec.outputs[index], array_batch_back(outputs[index], self._axes_out[index])
            if array.dtype != self._output_dtypes[index]:
                raise EngineFailed(_wrong_dtype(tensor, array))
            entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": array.shape}
            if asked.classes:
                entry["datatype"] = "BYTES"
                entry["shape"], best = classify(outputs[index], tensor, asked.classes, self.spec.batched)
                _add_text(entry, best, asked.binary, chunks)
            elif asked.binary:
                entry["parameters"] = {"binary_data_size": array.nbytes}
                if array.nbytes:
                    chunks.append(_raw_bytes(array, tensor))
            else:
                entry["data"] = writable(array).reshape(-1)
            entries.append(entry)
        return entries, chunks


def _head_size(text: str, length: int) -> int:
    if not _HEADER_LENGTH.fullmatch(text):
        raise BadRequest(f"Inference-Header-Content-Length must be a number of bytes, got: {text[:40]!r}")
    if (head := int(text)) > length:
        raise BadRequest(f"inference header size should be in range (0, {length}), got: {head}")
    return head


def _raw_shape(spec: ModelSpec, length: int) -> tuple[int, ...]:
    tensor = spec.inputs[0]
    shape = [dim.wire for dim in tensor.shape]
    if spec.batched:
        shape[tensor.batch_axis] = 1
    if shape.count(-1) > 1:
        raise BadRequest(
            f"The shape of the raw input '{tensor.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    row = tensor.type.itemsize
    for size in shape:
        row *= size if size != -1 else 1
    if -1 in shape and row:
        shape[shape.index(-1)] = length // row
        row *= length // row
    if row != length:
        raise BadRequest(
            f"input byte size mismatch for input '{tensor.name}' for model '{spec.name}'. "
            f"Expected {row}, got {length}"
        )
    if fault := tensor.fault(shape, tensor.datatype):
        raise BadRequest(f"input '{tensor.name}' of model '{spec.name}': {fault}")
    return tuple(shape)


def _from_json(item: DeclaredInput, model: str) -> np.ndarray:
    """JSON ``data``, flat or nested to the shape (axes of size 1 may be left out or added)."""
    array = array_of(item.data, item.datatype, f"input '{item.name}' of model '{model}': data")
    if array.size != item.elements:
        raise UnreadableTensor(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{item.name}' "
            f"declares the shape {list(item.shape)} = {item.elements} elements, got {array.size}"
        )
    if array.ndim > 1 and _bare(array.shape) != _bare(item.shape):
        raise UnreadableTensor(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{item.name}' "
            f"declares the shape {list(item.shape)}, but its data is nested to {list(array.shape)}"
        )
    return array.reshape(item.shape)


def _bare(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _raw_bytes(array: np.ndarray, tensor: TensorSpec) -> memoryview | bytes:
    """The array's bytes, without a copy where ``b"".join`` takes it; bfloat16 has no buffer format."""
    if array.flags.c_contiguous and tensor.datatype != "BF16":
        return array.data
    return array.tobytes()


def _add_text(
    entry: dict[str, Any], texts: list[str], binary: bool, chunks: list[memoryview | bytes]
) -> None:
    if not binary:
        entry["data"] = texts
        return
    data = bytes_tensor(texts)
    entry["parameters"] = {"binary_data_size": len(data)}
    if data:
        chunks.append(data)


def _with_nan(message: dict[str, Any], nan_as: str) -> bytes:
    """The message with non-finite numbers written as ``nan_as`` (as Triton: bare tokens), and their count in it."""
    odd = 0
    entries = []
    for entry in message["outputs"]:
        if isinstance(entry.get("data"), np.ndarray):
            text, count = dump_flat(entry["data"], nan_as)
            entry = {**entry, "data": orjson.Fragment(text)}
            odd += count
        entries.append(entry)
    parameters = {**message["parameters"], "nonfinite_count": odd} if odd else message["parameters"]
    return orjson.dumps({**message, "parameters": parameters, "outputs": entries}, option=_NUMPY)


def _wrong_dtype(tensor: TensorSpec, array: np.ndarray) -> str:
    return (
        f"the engine gave output '{tensor.name}' as {array.dtype}, but the model's signature says "
        f"{tensor.datatype}. This is a bug in halfeven, not in the request."
    )
