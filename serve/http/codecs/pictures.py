"""PNG and JPEG files of a prediction request as the rows of the model's picture inputs."""

import base64
import binascii
from collections.abc import Iterable
from typing import Any

import numpy as np

from ....models.errors import BadInput, BadRequest
from ....models.pictures.picture import picture_row
from ....models.pictures.pixels import Picture
from ....models.spec.spec import ModelSpec, TensorSpec
from ..limits.memory_budget import Lease
from .json_numbers import show
from .multipart import FormPart

BASE64 = "b64"  # TensorFlow Serving's word for bytes in JSON
Files = Iterable[tuple[str, bytes]]


def picture_inputs(spec: ModelSpec) -> list[TensorSpec]:
    """The inputs that take pictures. Raises BadRequest where there are none."""
    found = [tensor for tensor in spec.inputs if tensor.picture is not None]
    if not found:
        inputs = ", ".join(f"'{t.name}' ({t.datatype} {t.describe_shape()})" for t in spec.inputs)
        raise BadRequest(
            f"model '{spec.name}' takes no pictures: no input has a picture entry in model.toml; send numbers for "
            f"{inputs}"
        )
    return found


def rows_of(spec: ModelSpec, tensor: TensorSpec, files: Files, lease: Lease) -> np.ndarray:
    """``(what to call it, bytes)`` each to a row of the input. Raises BadInput naming the file, Overloaded."""
    picture = Picture.of(tensor, spec.batched)
    rows = [_row(called, data, picture, lease) for called, data in files]
    if not spec.batched:
        if len(rows) != 1:
            raise BadRequest(f"model '{spec.name}' is not batched: expected one picture, got {len(rows)}")
        return rows[0]
    if odd := next((row.shape for row in rows if row.shape != rows[0].shape), None):
        raise BadRequest(
            f"input '{tensor.name}' of model '{spec.name}' takes pictures of any size, but those of one request "
            f"must be equal: got {list(rows[0].shape)} and {list(odd)}"
        )
    lease.add(sum(row.nbytes for row in rows))
    return np.stack(rows)


def _row(called: str, data: bytes, picture: Picture, lease: Lease) -> np.ndarray:
    try:
        row = picture_row(data, picture, hold=lease.meanwhile)
    except BadInput as error:
        raise type(error)(f"{called}: {error}") from None
    lease.add(row.nbytes)
    return row


def arrays_of_parts(spec: ModelSpec, parts: list[FormPart], lease: Lease) -> dict[str, np.ndarray]:
    """A form's files: with one input in any field, with several in the fields of their names."""
    inputs = picture_inputs(spec)
    if not parts:
        raise BadRequest("the form has no file; expected one picture or more, such as -F file=@cat.png")
    if len(spec.inputs) == 1:
        return {inputs[0].name: rows_of(spec, inputs[0], ((f"file {p.shown}", p.data) for p in parts), lease)}
    names = [tensor.name for tensor in inputs]
    if len(inputs) != len(spec.inputs) or any(part.name not in names for part in parts):
        others = [tensor.name for tensor in spec.inputs]
        raise BadRequest(
            f"the form's fields are {sorted({part.name for part in parts})[:10]}: model '{spec.name}' takes the "
            f"inputs {others}, of which {names} are pictures; name each field as its input"
            + ("" if len(names) == len(others) else ", and send an npz file, for not all are pictures")
        )
    return {
        tensor.name: rows_of(
            spec, tensor, ((f"file {p.shown}", p.data) for p in parts if p.name == tensor.name), lease
        )
        for tensor in inputs
        if any(part.name == tensor.name for part in parts)
    }


def is_file(instance: Any) -> bool:
    """True if an instance of the JSON is ``{"b64": "…"}``."""
    return isinstance(instance, dict) and instance.keys() == {BASE64}


def array_of_files(
    spec: ModelSpec, tensor: TensorSpec, instances: list[Any], where: str, lease: Lease
) -> np.ndarray:
    """Instances ``{"b64": "…"}`` of one input."""
    return rows_of(
        spec,
        tensor,
        ((f"{where}[{i}]", _unpacked(item, f"{where}[{i}]")) for i, item in enumerate(instances)),
        lease,
    )


def _unpacked(instance: Any, where: str) -> bytes:
    if not is_file(instance) or not isinstance(instance[BASE64], str):
        raise BadRequest(f'{where}: expected {{"b64": "…"}} like the others, got {show(instance)}')
    try:
        return base64.b64decode(instance[BASE64], validate=True)
    except (binascii.Error, ValueError) as fault:
        raise BadRequest(f"{where}: the string under 'b64' is not base64 ({fault})") from None


def packed(data: bytes) -> dict[str, str]:
    """Bytes as JSON carries them."""
    return {BASE64: base64.b64encode(data).decode()}
