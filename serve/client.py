"""``halfeven predict``: a file's tensors to a running server, with nothing but the standard library."""

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load_file

from ..exporters.samples import TARGET
from ..models.datatypes import name_of
from ..models.errors import BadInput, NotReady


def predict_file(url: str, name: str, file: Path, timeout_s: float = 60.0) -> dict[str, Any]:
    """The V2 answer to the tensors of an npz, safetensors or JSON file (``{input: nested lists}``).

    Raises BadInput with the server's own words where it refuses, NotReady where nobody answers.
    """
    inputs = _read(file)
    if file.suffix == ".json":
        return _post(f"{url}/v1/models/{urllib.parse.quote(name)}:predict", orjson.dumps(inputs), timeout_s)
    tensors = [
        {
            "name": key,
            "shape": list(array.shape),
            "datatype": name_of(array.dtype),
            "data": array.ravel().tolist(),
        }
        for key, array in inputs.items()
    ]
    body = orjson.dumps({"inputs": tensors})
    return _post(f"{url}/v2/models/{urllib.parse.quote(name)}/infer", body, timeout_s)


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".json":
            return json.loads(file.read_text())
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        if file.suffix == ".safetensors":
            return {key: array for key, array in load_file(file).items() if not key.startswith(TARGET)}
    except Exception as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    raise BadInput(f"{file}: expected .npz, .safetensors or .json")


def _post(url: str, body: bytes, timeout_s: float) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--url: expected http://… or https://…, got {url[:80]!r}")
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return {"status": answer.status, "headers": _ours(answer.headers), **json.loads(answer.read())}
    except urllib.error.HTTPError as error:
        raise BadInput(
            f"the server refused with {error.code}: {error.read(4000).decode(errors='replace')}"
        ) from None
    except OSError as error:
        raise NotReady(f"nobody answers at {url}: {error}; is `halfeven serve` running there?") from None


def _ours(headers: Any) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.startswith("halfeven-")}
