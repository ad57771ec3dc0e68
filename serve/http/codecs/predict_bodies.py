"""The bodies of ``:predict``: that of a request is recognised and read (JSON, npy, npz, a picture or a form of
pictures), that of an answer is written in the type that the caller accepts.

A form needs its content type. The other kinds are recognised by their first bytes, for curl sends every body with
``application/x-www-form-urlencoded``.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ....models.errors import BadRequest
from ....models.pictures.picture import is_picture, png_of
from ....models.pictures.pixels import Picture
from ....models.spec.spec import ModelSpec
from ..limits.memory_budget import Lease, json_bytes
from .multipart import is_multipart, read_parts
from .numpy_files import NPY, NPY_TYPE, NPZ, NPZ_TYPE, read_npy, read_npz, write_npy, write_npz
from .pictures import BASE64, arrays_of_parts, picture_inputs, rows_of
from .predict import PredictRequest, given_as_called, read_predict, taken, taken_as_called, write_predict

SHORT_JSON = 65_536  # bytes that are parsed in less time than a hand-over to a thread takes
_FILE_IN_JSON = b'"%s"' % BASE64.encode()
JSON_TYPE, PNG_TYPE = "application/json", "image/png"
_MANY = 2**20  # elements that take longer to write than a hand-over to a thread


def is_quick(content_type: str, body: bytes) -> bool:
    """True if reading the body takes less time than handing it to a thread would."""
    if is_multipart(content_type) or is_picture(body) or body.startswith(NPZ):
        return False
    return body.startswith(NPY) or (len(body) <= SHORT_JSON and _FILE_IN_JSON not in body)


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
        return _from_npy(spec, body)
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


def _from_npy(spec: ModelSpec, body: bytes) -> PredictRequest:
    if len(spec.inputs) != 1:
        raise BadRequest(
            f"an npy file has one array, model '{spec.name}' has the inputs {[t.name for t in spec.inputs]}; "
            "send an npz file with arrays of these names"
        )
    return taken_as_called(spec, {spec.inputs[0].name: read_npy(body, "the npy file")})


def _check_said(content_type: str, body: bytes) -> None:
    """Raise BadRequest where the content type names a kind that the bytes are not: they are not parsed as JSON."""
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
    """True if writing takes less than handing it to a thread would."""
    return all(tensor.kind != "image" for tensor in spec.outputs) and sum(a.size for a in outputs) < _MANY
