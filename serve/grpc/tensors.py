"""An infer request and its answer between the gRPC messages and the codec of the V2 protocol.

The codec is the one that HTTP has: a request becomes the fields of the protocol's JSON and the bytes of each input, so
every check and every refusal is the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...models.errors import BadRequest
from ...models.spec.datatypes import DATATYPES
from ...models.spec.spec import ModelSpec
from ..http.codecs.infer import InferCodec, InferRequest
from ..http.codecs.json_numbers import PIECE
from .messages import message

FINAL = "triton_final_response"
WANTS_FINAL = "triton_enable_empty_final_response"
_FEW_TOO_MANY = 64  # tensors more than the model has; up to so many more the codec refuses, and names them
PART_BYTES = 256  # of memory, which a size or a parameter takes as a Python object
_TYPED_BYTES = 48  # of an element while typed contents are converted: an object and its place in a list
_SHARED = "shared_memory_region"
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_RAW_ONLY = ("FP16", "BF16")


def fields_of(request: Any) -> tuple[dict[str, Any], list[bytes]]:
    """A ModelInferRequest as the JSON's fields and the bytes of each input, for `InferCodec.read_message`.

    Raises BadRequest where the contents are not of one kind.
    """
    tensors = _bytes_of(request)
    inputs = []
    for tensor, data in zip(request.inputs, tensors, strict=True):
        parameters = _plain(tensor.parameters)
        if _SHARED not in parameters:  # the codec refuses it by name
            parameters["binary_data_size"] = len(data)
        shape = list(tensor.shape)
        if min(shape, default=0) < 0:  # the codec speaks of JSON there
            raise BadRequest(
                f"input '{tensor.name[:80]}' came with the shape {str(shape[:80])[:80]}: expected sizes of 0 or more"
            )
        inputs.append(
            {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "parameters": parameters}
        )
    outputs = [
        {"name": asked.name, "parameters": {**_plain(asked.parameters), "binary_data": True}}
        for asked in request.outputs
    ]
    parameters = {**_plain(request.parameters), "binary_data_output": True}
    parameters.pop(WANTS_FINAL, None)
    fields: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "parameters": parameters}
    if request.id:
        fields["id"] = request.id
    return fields, tensors


def check_counts(request: Any, spec: ModelSpec) -> None:
    """Refuse a request with far more tensors than the model has, before they become Python objects: a tensor can be two
    bytes of the message and takes a kilobyte of memory. Raises BadRequest."""
    counts = (
        ("inputs", len(request.inputs), len(spec.inputs)),
        ("raw_input_contents", len(request.raw_input_contents), len(spec.inputs)),
        ("outputs", len(request.outputs), len(spec.outputs)),
    )
    for what, came, most in counts:
        if came > most + _FEW_TOO_MANY:
            raise BadRequest(f"expected {most} {what} but got {came} {what} for model '{spec.name}'")


def parts_of(request: Any) -> int:
    """The number of sizes and parameters in the request, each of which becomes an object in Python."""
    inputs = sum(len(tensor.shape) + len(tensor.parameters) for tensor in request.inputs)
    return inputs + sum(len(asked.parameters) for asked in request.outputs) + len(request.parameters)


def typed_bytes(request: Any) -> int:
    """About the bytes that converting typed contents takes; 0 where the request has none."""
    return sum(
        len(getattr(tensor.contents, field.name)) * _TYPED_BYTES
        for tensor in request.inputs
        for field, _ in tensor.contents.ListFields()
    )


def _bytes_of(request: Any) -> list[bytes]:
    """Each input's elements as little-endian bytes."""
    raw = request.raw_input_contents
    if not raw:
        return [_typed(tensor) for tensor in request.inputs]
    if typed := [tensor.name for tensor in request.inputs if tensor.contents.ListFields()]:
        raise BadRequest(
            f"contents field must not be specified when using raw_input_contents: input '{typed[0][:80]}' has both"
        )
    shared = any(_SHARED in tensor.parameters for tensor in request.inputs)
    if not shared and len(raw) != len(request.inputs):
        raise BadRequest(
            f"expected {len(request.inputs)} raw_input_contents, one for each input in their order, got {len(raw)}"
        )
    # Inputs in shared memory have no raw contents: what is left out is never read.
    return list(raw) if not shared else [b""] * len(request.inputs)


def _typed(tensor: Any) -> bytes:
    came = [field.name for field, _ in tensor.contents.ListFields()]
    if not came:
        return b""
    name, datatype = tensor.name[:80], tensor.datatype
    if datatype in _RAW_ONLY:
        raise BadRequest(f"input '{name}': {datatype} has no typed contents; send it in raw_input_contents")
    wanted = _CONTENTS.get(datatype)
    if wanted is None:  # BYTES, or no datatype: the codec refuses it by name
        return b""
    if came != [wanted]:
        raise BadRequest(
            f"input '{name}': {datatype} elements must be in contents.{wanted}, they came in {', '.join(came)}"
        )
    contents, dtype = getattr(tensor.contents, wanted), DATATYPES[datatype].numpy
    elements = np.empty(len(contents), dtype)
    try:
        # One conversion of all elements would keep the interpreter's lock until its end.
        for at in range(0, len(contents), PIECE):
            elements[at : at + PIECE] = np.array(contents[at : at + PIECE], dtype)
    except OverflowError as error:
        raise BadRequest(f"input '{name}': an element does not fit {datatype}: {error}") from None
    return elements.tobytes()


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON has them; one without a value is left out."""
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {key: getattr(parameters[key], kind) for key, kind in chosen.items() if kind}


def response_of(
    codec: InferCodec,
    request: InferRequest,
    outputs: Sequence[np.ndarray],
    version: str,
    parameters: Mapping[str, str],
) -> Any:
    """A ModelInferResponse with raw contents, in the order in which the outputs were asked for."""
    entries, chunks = codec.entries(request, outputs)
    response = message("ModelInferResponse")(
        model_name=codec.spec.name, model_version=version, id=request.id or ""
    )
    for key, value in parameters.items():
        response.parameters[key].string_param = value
    rest = iter(chunks)
    for entry in entries:
        response.outputs.add(name=entry["name"], datatype=entry["datatype"], shape=list(entry["shape"]))
        size = entry["parameters"]["binary_data_size"]
        response.raw_output_contents.append(bytes(next(rest)) if size else b"")
    return response
