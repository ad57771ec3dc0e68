"""Requests of a model's page: examples for the form, for curl and for Python, and the form as it was filled in."""

import json
import math
import shlex
from typing import Any
from urllib.parse import quote

import numpy as np

from ...models.errors import BadRequest
from ...models.pictures.picture import is_picture
from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ..http.codecs.json_numbers import array_of, number_of, parse
from ..http.codecs.multipart import is_multipart, read_parts
from ..http.codecs.numpy_files import NPY, read_npy
from ..http.codecs.pictures import rows_of
from ..http.codecs.predict import PredictRequest, taken
from ..http.limits.memory_budget import Lease, json_bytes

MOST_WRITTEN = 64  # numbers of an input; what is larger is sent as a file
_FREE = 4  # the size of a free axis in an example, where its bounds allow it


def example(spec: ModelSpec, tensor: TensorSpec) -> Any:
    """One instance of the input as JSON: within the bounds of its shape and values, otherwise without a meaning."""
    shape = example_shape(spec, tensor)
    if tensor.range is not None:
        return np.broadcast_to(tensor.range.low, shape).tolist()
    value = 1.0 if tensor.type.is_float else True if tensor.datatype == "BOOL" else 1
    return np.full(shape, value, object).tolist()


def example_shape(spec: ModelSpec, tensor: TensorSpec) -> tuple[int, ...]:
    return tuple(map(_size, tensor.shape[1:] if spec.batched else tensor.shape))


def _size(dim: Dim) -> int:
    return max(dim.minimum, min(_FREE, dim.maximum or _FREE)) if dim.minimum == 1 else dim.minimum


def is_written(spec: ModelSpec, tensor: TensorSpec) -> bool:
    """True where an instance of the input is short enough to be typed."""
    return math.prod(example_shape(spec, tensor)) <= MOST_WRITTEN


def curl(spec: ModelSpec, server: str, needs_key: bool) -> str:
    """A command for a shell. ``server``: the URL at which the page was asked for."""
    url = shlex.quote(f"{server}/v1/models/{quote(spec.name)}:predict")
    key = ' -H "Authorization: Bearer $HALFEVEN_API_KEY"' if needs_key else ""
    if all(tensor.picture is not None for tensor in spec.inputs):
        files = " ".join(f"-F {shlex.quote(f'{tensor.name}=@picture.png')}" for tensor in spec.inputs)
        return f"curl{key} {files} {url}"
    if all(is_written(spec, tensor) for tensor in spec.inputs):
        given = {tensor.name: example(spec, tensor) for tensor in spec.inputs}
        instance = next(iter(given.values())) if len(given) == 1 else given
        return f"curl{key} --json {shlex.quote(json.dumps({'instances': [instance]}))} {url}"
    arrays = ", ".join(f"{tensor.name!r}: {_array(spec, tensor)}" for tensor in spec.inputs)
    more = ", ml_dtypes" if "ml_dtypes." in arrays else ""
    made = f"import numpy as np{more}; np.savez('inputs.npz', **{{{arrays}}})"
    return f"python -c {shlex.quote(made)}\ncurl{key} --data-binary @inputs.npz {url}"


def python(spec: ModelSpec, server: str) -> str:
    """A request for the model in Python, with ``halfeven.Client``, which takes a key from HALFEVEN_API_KEY."""
    arrays = "".join(f"    {tensor.name!r}: {_array(spec, tensor)},\n" for tensor in spec.inputs)
    more = "import ml_dtypes\n" if "ml_dtypes." in arrays else ""
    return (
        f"import halfeven as he\n{more}import numpy as np\n\nclient = he.Client({server!r})\n"
        f"outputs = client.infer({spec.name!r}, {{\n{arrays}}})\nprint(outputs)"
    )


def _array(spec: ModelSpec, tensor: TensorSpec) -> str:
    """An expression of numpy for one row, in the axes of the model's callers."""
    shape = [*((1,) if spec.batched else ()), *example_shape(spec, tensor)]
    if tensor.batch_axis:
        shape.insert(tensor.batch_axis, shape.pop(0))
    dtype = "ml_dtypes.bfloat16" if tensor.datatype == "BF16" else repr(tensor.type.numpy.name)
    ends = set(tensor.range.low) if tensor.range is not None else {1}
    if len(ends) == 1:
        return f"np.full({tuple(shape)}, {ends.pop()}, {dtype})"
    return f"np.array([{example(spec, tensor)}], {dtype})"


def read_typed(spec: ModelSpec, content_type: str, body: bytes, lease: Lease) -> PredictRequest:
    """The form as one request: for each input a picture, an npy file, or numbers as JSON. The field of the n-th input
    is ``input-n``. Raises BadRequest naming the input, Overloaded."""
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
        array = read_npy(data, where, lease)
        return array[None] if spec.batched and array.ndim == len(tensor.shape) - 1 else array
    with lease.meanwhile(json_bytes(data)):
        value = parse(data)
        if spec.batched:
            return array_of([value], tensor.type, where)
        return (array_of if tensor.shape else number_of)(value, tensor.type, where)
