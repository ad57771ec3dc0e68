"""``halfeven predict``: a file's tensors or picture to a running server, over the standard library's HTTP."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ...exporters.inputs.samples import TARGET, read_tensors
from ...models.errors import BadInput, EngineFailed
from ...models.files.opened_file import opened_named
from ...models.spec.datatypes import DATATYPES, name_of
from ..access.direct_requests import ask, json_of, model_path
from ..http.codecs.infer_client import write_json
from ..http.codecs.json_numbers import array_of
from ..http.codecs.numpy_files import write_npz

_AS_THEY_ARE = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".npy": "application/x-npy"}
_ANSWERS = {".png": "image/png", ".npy": "application/x-npy", ".npz": "application/x-npz"}


def predict_file(url: str, name: str, file: Path, out: Path | None = None) -> dict[str, Any]:
    """The answer to a picture (PNG, JPEG), an npy, npz, safetensors or JSON file (``{input: nested lists}``).

    With ``out`` (.png, .npy or .npz) the answer goes into that file and its name comes back. Raises as `ask`, and
    EngineFailed where the answer is not one of halfeven's.
    """
    url = url.rstrip("/")
    model = f"{url}{model_path(name, 'v1')}:predict"
    named = _named(url, name, file) if file.suffix.lower() == ".json" else None
    body, kind = (write_npz(named), "application/x-npz") if named is not None else _body(file)
    if out is not None:
        return _into(out, *ask(model, body, kind, _accept(out)))
    if named is not None or file.suffix.lower() in (".npz", ".safetensors"):
        arrays = _read(file) if named is None else named
        model, (body, _) = f"{url}{model_path(name)}/infer", write_json(arrays)
        kind = "application/json"
    headers, answer = ask(model, body, kind, "application/json")
    return {"status": 200, "headers": _ours(headers), **_object(model, answer)}


def _body(file: Path) -> tuple[bytes, str]:
    """The file as a body for ``:predict``, and its content type."""
    suffix = file.suffix.lower()
    if suffix in _AS_THEY_ARE or suffix == ".npz":
        try:
            with opened_named(file) as opened:
                return opened.read(), _AS_THEY_ARE.get(suffix, "application/x-npz")
        except OSError as error:
            raise BadInput(f"{file} cannot be read: {error.strerror}") from error
    if suffix == ".safetensors":
        return write_npz(_read(file)), "application/x-npz"
    return orjson.dumps(_read(file)), "application/json"


def _named(url: str, name: str, file: Path) -> dict[str, np.ndarray] | None:
    """A JSON file's ``{input: nested lists}`` as the arrays that the model takes; None for ``{"instances": …}``.

    The datatypes are the server's word: JSON has none. Raises BadInput naming the input.
    """
    message = _read(file)
    if not isinstance(message, dict) or not message:
        raise BadInput(
            f'{file}: expected {{"INPUT": nested lists, …}} or {{"instances": [...]}}, got {str(message)[:80]}'
        )
    if "instances" in message:
        return None
    model = f"{url}{model_path(name)}"
    said = _object(model, ask(model, None)[1])
    try:
        inputs = [(one["name"], one["datatype"], one["shape"]) for one in said["inputs"]]
        datatypes = {tensor: DATATYPES[datatype] for tensor, datatype, _ in inputs}
    except (KeyError, TypeError) as error:
        raise EngineFailed(f"{model} does not describe the model as halfeven does: {error!r}") from None
    if message.keys() != datatypes.keys():
        wanted = ", ".join(f"'{tensor}' {datatype} {shape}" for tensor, datatype, shape in inputs)
        raise BadInput(f"{file}: model '{name}' takes the inputs {wanted}; got {sorted(message)}")
    return {key: array_of(data, datatypes[key], f"{file}: '{key}'") for key, data in message.items()}


def _object(url: str, answer: bytes) -> dict[str, Any]:
    """The JSON object that a server answered. Raises EngineFailed."""
    said = json_of(url, answer)
    if not isinstance(said, dict):
        raise EngineFailed(
            f"{url} does not answer with a JSON object: is it a halfeven server? {answer[:80]!r}"
        )
    return said


def _accept(out: Path) -> str:
    if out.suffix not in _ANSWERS:
        raise BadInput(f"--out {out}: expected a name that ends with one of {', '.join(_ANSWERS)}")
    return _ANSWERS[out.suffix]


def _into(out: Path, headers: Mapping[str, str], answer: bytes) -> dict[str, Any]:
    if headers.get("content-type") != _ANSWERS[out.suffix]:
        raise BadInput(f"--out {out}: this answer is none ({headers.get('content-type')}); leave --out away")
    out.write_bytes(answer)
    return {"status": 200, "headers": _ours(headers), "file": str(out)}


def _read(file: Path) -> Any:
    suffix = file.suffix.lower()
    if suffix in (".npz", ".safetensors"):
        arrays = read_tensors(file).items()
        return _sendable(file, {key: array for key, array in arrays if not key.startswith(TARGET)})
    if suffix != ".json":
        raise BadInput(f"{file}: expected .png, .jpg, .npy, .npz, .safetensors or .json")
    try:
        with opened_named(file) as opened:
            return json.loads(opened.read())
    except Exception as error:
        raise BadInput(f"{file} cannot be read: {error}") from error


def _sendable(file: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays. Raises BadInput for one of a datatype that no model takes."""
    for key, array in arrays.items():
        if (came := name_of(array.dtype)) not in DATATYPES:
            raise BadInput(
                f"{file}: '{key}': expected one of the datatypes {', '.join(DATATYPES)}, got {came}"
            )
    return arrays


def _ours(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith(("halfeven-", "content-type"))}
