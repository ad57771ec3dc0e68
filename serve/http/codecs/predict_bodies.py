"""Recognises and reads the body of a ``:predict`` request: JSON, npy, npz, a picture or a form of pictures.

A form needs its content type. The other kinds are recognised by their first bytes, for curl sends every body with
``application/x-www-form-urlencoded``.
"""

import numpy as np

from ....models.errors import BadRequest
from ....models.pictures.picture import is_picture
from ....models.spec.spec import ModelSpec
from ..limits.memory_budget import Lease, json_bytes
from .multipart import is_multipart, read_parts
from .numpy_files import NPY, NPY_TYPE, NPZ, NPZ_TYPE, read_npy, read_npz
from .pictures import BASE64, arrays_of_parts, picture_inputs, rows_of
from .predict import PredictRequest, read_predict, taken, taken_as_called

SHORT_JSON = 65_536  # bytes that are parsed in less time than a hand-over to a thread takes
_FILE_IN_JSON = b'"%s"' % BASE64.encode()


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
