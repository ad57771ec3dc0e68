"""The form of a model's page as one request: for each input a picture, an npy file, or numbers as JSON."""

import numpy as np

from ...models.errors import BadRequest
from ...models.pictures.picture import is_picture
from ...models.spec import ModelSpec, TensorSpec
from ..http.codecs.json_numbers import array_of, parse
from ..http.codecs.multipart import is_multipart, read_parts
from ..http.codecs.numpy_files import NPY, read_npy
from ..http.codecs.pictures import rows_of
from ..http.codecs.predict import PredictRequest, taken
from ..http.limits.memory_budget import Lease, json_bytes


def read_typed(spec: ModelSpec, content_type: str, body: bytes, lease: Lease) -> PredictRequest:
    """One instance; the field of the n-th input is ``input-n``. Raises BadRequest naming the input, Overloaded."""
    if not is_multipart(content_type):
        raise BadRequest("expected the form of the model's page (multipart/form-data)")
    lease.add(len(body))  # the parts are copies
    parts = {part.name: part.data for part in read_parts(content_type, body, len(spec.inputs))}
    arrays = {
        tensor.name: _row(spec, tensor, parts.get(f"input-{index}", b""), lease)
        for index, tensor in enumerate(spec.inputs)
    }
    return taken(spec, arrays)


def _row(spec: ModelSpec, tensor: TensorSpec, data: bytes, lease: Lease) -> np.ndarray:
    where = f"input '{tensor.name}'"
    if not data.strip():
        raise BadRequest(f"{where} is empty: expected {'a picture' if tensor.picture else 'numbers'}")
    if tensor.picture is not None and is_picture(data):
        return rows_of(spec, tensor, [(where, data)], lease)
    if data.startswith(NPY):
        array = read_npy(data, where)
        return array[None] if spec.batched and array.ndim == len(tensor.shape) - 1 else array
    with lease.meanwhile(json_bytes(data)):
        value = parse(data)
        if not spec.batched and tensor.shape:
            return array_of(value, tensor.type, where)
        array = array_of([value], tensor.type, where)
        return array if spec.batched else array.reshape(())
