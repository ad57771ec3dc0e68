"""``:predict``, for people with curl: ``{"instances": [...]}`` in, ``{"predictions": [...]}`` out.

Pictures are ``{"b64": "…"}`` both ways. Source of the words: TensorFlow Serving's REST API, row format.

The body of a request may also be npy, npz, a picture or a form of pictures. A form needs its content type. The other
kinds are recognised by their first bytes, for curl sends every body with ``application/x-www-form-urlencoded``. The
body of an answer is written in the type that the caller accepts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from ....models.errors import BadRequest
from ....models.pictures.picture import is_picture, png_of
from ....models.pictures.pixels import Picture
from ....models.spec.batch_axis import array_batch_back, array_batch_first
from ....models.spec.datatypes import name_of
from ....models.spec.spec import ModelSpec, TensorSpec
from ...batching.interface import NO_TERMS, Terms
from ..limits.memory_budget import Lease, json_bytes
from .json_numbers import (
    MANY,
    PIECE,
    array_of,
    dump_nested,
    dump_rows,
    number_of,
    parse_tensors,
    show,
    writable,
)
from .multipart import is_multipart, read_parts
from .numpy_files import NPY, NPY_TYPE, NPZ, NPZ_TYPE, is_plain_npy, read_npy, read_npz, write_npy, write_npz
from .pictures import BASE64, array_of_files, arrays_of_parts, is_file, packed, picture_inputs, rows_of

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


class PredictRequest(NamedTuple):
    """``arrays`` in the spec's order; ``rows`` is the number of instances; ``kind`` is the media type of the answer."""

    arrays: list[np.ndarray]
    rows: int
    terms: Terms = NO_TERMS
    kind: str = "application/json"


def read_predict(spec: ModelSpec, body: bytes, lease: Lease) -> PredictRequest:
    """Read instances: a nested list each, or an object by input name (a must where there are several).

    A model that is not batched takes one instance, the whole input. Pictures count in the lease. Raises
    BadRequest naming the instance, Overloaded.
    """
    instances = _instances(spec, parse_tensors(body))
    by_name = len(spec.inputs) > 1 or (isinstance(instances[0], dict) and not _is_picture(spec, instances))
    if by_name:
        _check_instances(spec, instances)
    arrays = {}
    for tensor in spec.inputs:
        where = f"input '{tensor.name}' of model '{spec.name}': instances"
        data = [instance[tensor.name] for instance in instances] if by_name else instances
        arrays[tensor.name] = _array(spec, tensor, data, where, lease)
    return taken(spec, arrays)


def taken(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> PredictRequest:
    """Named arrays, of any kind of body, checked against the spec. Raises BadRequest."""
    rows = spec.check_inputs(arrays)
    return PredictRequest([arrays[tensor.name] for tensor in spec.inputs], rows)


def taken_as_called(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> PredictRequest:
    """Whole tensors in the model's own layout, such as numpy files have. Raises BadRequest."""
    moved = dict(arrays)
    for tensor in spec.inputs:
        if tensor.batch_axis and (array := arrays.get(tensor.name)) is not None:
            if fault := tensor.as_called().fault(array.shape, name_of(array.dtype)):
                raise BadRequest(
                    f"input '{tensor.name}' of model '{spec.name}': {fault} (axis {tensor.batch_axis} is the batch)"
                )
            moved[tensor.name] = array_batch_first(array, tensor.batch_axis)
    return taken(spec, moved)


def given_as_called(spec: ModelSpec, outputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by name in the model's own layout."""
    return {t.name: array_batch_back(a, t.batch_axis) for t, a in zip(spec.outputs, outputs, strict=True)}


def _is_picture(spec: ModelSpec, instances: Sequence[Any]) -> bool:
    """True if the instances of a single input are files; ``b64`` may also be that input's name."""
    return spec.inputs[0].picture is not None and is_file(instances[0])


def _instances(spec: ModelSpec, message: Any) -> list[Any]:
    instances = message.get("instances") if isinstance(message, dict) else None
    if not isinstance(instances, list) or not instances:
        keys = isinstance(message, dict) and instances is None
        got = list(message)[:5] if keys else show(message if instances is None else instances)
        raise BadRequest(f'expected {{"instances": [...]}} with at least one instance, got {got}')
    most = spec.max_batch_size or 1
    if len(instances) > most:
        raise BadRequest(
            f"model '{spec.name}' takes at most {most} instances in one request, got {len(instances)}; "
            "send several requests (the server batches them again)"
        )
    return instances


def _check_instances(spec: ModelSpec, instances: Sequence[Any]) -> None:
    wanted = {tensor.name for tensor in spec.inputs}
    for index, instance in enumerate(instances):
        if not isinstance(instance, dict):
            raise BadRequest(
                f"instances[{index}]: expected an object with the inputs {sorted(wanted)} of model "
                f"'{spec.name}', got {show(instance)}"
            )
        if instance.keys() != wanted:
            raise BadRequest(
                f"instances[{index}]: expected the inputs {sorted(wanted)} of model '{spec.name}', "
                f"got {sorted(instance)}"
            )


def _array(spec: ModelSpec, tensor: TensorSpec, data: list[Any], where: str, lease: Lease) -> np.ndarray:
    if tensor.picture is not None and is_file(data[0]):
        return array_of_files(spec, tensor, data, where, lease)
    if not spec.batched and len(tensor.shape) == 0:
        return number_of(data[0], tensor.type, where)
    if not spec.batched:
        return array_of(data[0], tensor.type, f"{where}[0]")
    return array_of(data, tensor.type, where)


def write_predict(spec: ModelSpec, outputs: Sequence[np.ndarray]) -> bytes:
    """One output: a list of its rows; several: a list of objects by name. Non-finite numbers are null.

    Where the first output of logits or probabilities has labels, ``labels`` holds each row's best one. Rows of
    an output of kind ``image`` are PNG files.
    """
    plain = [writable(array) for array in outputs]
    rows = plain if spec.batched else [array[None] for array in plain]
    shown = [_shown(spec, tensor, array) for tensor, array in zip(spec.outputs, rows, strict=True)]
    elements = sum(array.size for array in plain)
    predictions = shown[0] if len(shown) == 1 else _by_name(spec, shown)
    if elements > PIECE:
        predictions = dump_rows(predictions, elements // len(predictions))
    message: dict[str, Any] = {"predictions": predictions}
    if labels := _labels(spec, rows):
        message["labels"] = labels
    return orjson.dumps(message, option=_NUMPY)


def _shown(spec: ModelSpec, tensor: TensorSpec, rows: np.ndarray) -> Sequence[Any] | np.ndarray:
    if tensor.kind != "image":
        return rows if rows[:1].size <= PIECE else [dump_nested(row) for row in rows]
    picture = Picture.of(tensor, spec.batched)
    return [packed(png_of(row, picture)) for row in rows]


def _by_name(spec: ModelSpec, rows: Sequence[Sequence[Any] | np.ndarray]) -> list[dict[str, Any]]:
    names = [tensor.name for tensor in spec.outputs]
    return [dict(zip(names, row, strict=True)) for row in zip(*rows, strict=True)]


def _labels(spec: ModelSpec, rows: Sequence[np.ndarray]) -> list[Any] | None:
    """Each row's label of the largest score; None (JSON null) for a row with a score that is no number."""
    scored = (
        (t, a) for t, a in zip(spec.outputs, rows, strict=True) if t.kind in ("logits", "probabilities")
    )
    tensor, scores = next(scored, (None, rows[0]))
    if tensor is None or not tensor.labels or scores.ndim < 2 or scores.shape[-1] != len(tensor.labels):
        return None
    best = np.array(tensor.labels, dtype=object)[np.argmax(scores, axis=-1)]
    best[np.isnan(scores).any(axis=-1)] = None
    return best.tolist()


_FIRST_OF_TEXT, _LAST_OF_TEXT = 0x09, 0x7E  # the bytes that JSON may begin with lie between
SHORT_JSON = 65_536  # bytes that are parsed in less time than a hand-over to a thread takes
_ESCAPE = rb"\u"
_FILE_IN_JSON = b'"%s"' % BASE64.encode()
JSON_TYPE, PNG_TYPE = "application/json", "image/png"


def is_quick(content_type: str, body: bytes) -> bool:
    """True if reading the body takes less time than handing it to a thread would."""
    if is_multipart(content_type) or is_picture(body) or body.startswith(NPZ):
        return False
    # A key may also be written with escapes: "\\u0062\\u0036\\u0034" is the same key.
    return is_plain_npy(body) or (
        len(body) <= SHORT_JSON and _FILE_IN_JSON not in body and _ESCAPE not in body
    )


def read_body_of(
    spec: ModelSpec, content_type: str, body: bytes, max_bytes: int, lease: Lease
) -> PredictRequest:
    """Read a body of any kind and check it against the spec. ``max_bytes`` bounds the unpacked size of an npz.

    The arrays that are read count in the lease. Raises BadRequest, TooLarge, Overloaded.
    """
    if is_multipart(content_type):
        most = max(spec.max_batch_size, 1) * len(spec.inputs)
        lease.add(len(body))  # the parts are copies
        return taken(spec, arrays_of_parts(spec, read_parts(content_type, body, most), lease))
    if is_picture(body):
        return taken(spec, {picture_inputs(spec)[0].name: _one_picture(spec, body, lease)})
    if body.startswith(NPZ):
        return taken_as_called(spec, read_npz(body, max_bytes, lease))
    if body.startswith(NPY):
        return _from_npy(spec, body, lease)
    _check_said(content_type, body)
    if len(body) <= SHORT_JSON:
        return read_predict(spec, body, lease)
    with lease.meanwhile(json_bytes(body)):
        return read_predict(spec, body, lease)


def _one_picture(spec: ModelSpec, body: bytes, lease: Lease) -> np.ndarray:
    tensor = picture_inputs(spec)[0]
    if len(spec.inputs) > 1:
        raise BadRequest(
            f"a picture alone does not say which of the inputs {[t.name for t in spec.inputs]} of model "
            f"'{spec.name}' it is; send a form (multipart/form-data) whose fields have the inputs' names"
        )
    return rows_of(spec, tensor, [("the body", body)], lease)


def _from_npy(spec: ModelSpec, body: bytes, lease: Lease) -> PredictRequest:
    if len(spec.inputs) != 1:
        raise BadRequest(
            f"an npy file has one array, model '{spec.name}' has the inputs {[t.name for t in spec.inputs]}; "
            "send an npz file with arrays of these names"
        )
    return taken_as_called(spec, {spec.inputs[0].name: read_npy(body, "the npy file", lease)})


def _check_said(content_type: str, body: bytes) -> None:
    """Raise BadRequest where the content type names a kind that the bytes are not, or where they are no text: they are
    not parsed as JSON then."""
    said = content_type.split(";")[0].strip().lower()
    if said.startswith("image/"):
        raise BadRequest(
            f"the body is said to be {said[:40]}, but is neither PNG nor JPEG; send one of these"
        )
    if said in (NPY_TYPE, NPZ_TYPE):
        raise BadRequest(
            f"the body is said to be {said}, but begins with {body[:8].hex(' ') or 'nothing'}; send the file as "
            "numpy saved it (curl: --data-binary @file)"
        )
    if not body or body[0] > _LAST_OF_TEXT or min(body[:8]) < _FIRST_OF_TEXT:
        came = f"begins with {body[:8].hex(' ')}" if body else "is empty"
        raise BadRequest(
            f'the body {came}: expected {{"instances": [...]}}, a PNG, JPEG, npy or npz file, or a form of pictures '
            "(curl: --data-binary @file)"
        )


def answer_type(spec: ModelSpec, rows: int, accept: str) -> str:
    """The first type of ``Accept`` that this answer can have, by quality and then order; JSON where none is.

    A PNG needs one row and one output of kind ``image``; where that is the only output, ``*/*`` means PNG.
    Raises BadRequest where npy is asked for and there are several outputs.
    """
    pictures = [tensor for tensor in spec.outputs if tensor.kind == "image"]
    png = PNG_TYPE if rows == 1 and len(pictures) == 1 else JSON_TYPE
    usual = png if len(spec.outputs) == 1 else JSON_TYPE
    if accept in ("", "*/*"):
        return usual
    known = {
        "*/*": usual, "application/*": JSON_TYPE, JSON_TYPE: JSON_TYPE, "image/*": png, PNG_TYPE: png,
        NPY_TYPE: NPY_TYPE, NPZ_TYPE: NPZ_TYPE,
    }  # fmt: skip
    found = next((known[name] for name in _ranges(accept) if name in known), JSON_TYPE)
    if found == NPY_TYPE and len(spec.outputs) > 1:
        raise BadRequest(
            f"model '{spec.name}' has {len(spec.outputs)} outputs, an npy file has one array: expected "
            f"Accept: {NPZ_TYPE}"
        )
    return found


def _ranges(accept: str) -> Iterator[str]:
    """The media ranges of an Accept header, best first."""
    ranked = []
    for item in accept.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        try:
            ranked.append((-float(quality), name))
        except ValueError:
            ranked.append((0.0, name))
    return (name for weight, name in sorted(ranked, key=lambda pair: pair[0]) if weight < 0)


def write_answer(spec: ModelSpec, outputs: Sequence[np.ndarray], kind: str) -> bytes:
    """The outputs as a body of the ``kind`` that `answer_type` chose."""
    if kind == PNG_TYPE:
        (tensor, array), *_ = [
            pair for pair in zip(spec.outputs, outputs, strict=True) if pair[0].kind == "image"
        ]
        return png_of(array[0] if spec.batched else array, Picture.of(tensor, spec.batched))
    if kind == NPY_TYPE:
        return write_npy(*given_as_called(spec, outputs).values())
    if kind == NPZ_TYPE:
        return write_npz(given_as_called(spec, outputs))
    return write_predict(spec, outputs)


def is_quick_to_write(spec: ModelSpec, outputs: Sequence[np.ndarray]) -> bool:
    """True if another thread need not write the answer."""
    return all(tensor.kind != "image" for tensor in spec.outputs) and sum(a.size for a in outputs) <= MANY
