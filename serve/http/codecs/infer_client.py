"""An infer request as a client writes it, and the answer as it reads it. No HTTP here.

Source: Open Inference Protocol V2 "Inference", Triton's binary tensor data extension.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from ....models.errors import BadInput, BadRequest
from ....models.spec.datatypes import DATATYPES, name_of
from .json_numbers import array_of, parse_tensors

HEADER_LENGTH = "Inference-Header-Content-Length"


def write_binary(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, str]]:
    """Body and headers; all outputs are asked for in binary."""
    raw = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    tensors = [
        {**_described(name, array), "parameters": {"binary_data_size": len(part)}}
        for (name, array), part in zip(arrays.items(), raw, strict=True)
    ]
    head = orjson.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}})
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return head + b"".join(raw), headers


def write_json(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, str]]:
    """Body and headers, every number as text."""
    tensors = [{**_described(name, array), "data": array.ravel().tolist()} for name, array in arrays.items()]
    return orjson.dumps({"inputs": tensors}), {"Content-Type": "application/json"}


def read_outputs(body: bytes, header_length: str | None) -> dict[str, np.ndarray]:
    """The outputs by name, as they came. Raises BadInput where the body is no infer answer."""
    try:
        place = head = len(body) if header_length is None else int(header_length)
        outputs = dict[str, np.ndarray]()
        for said in parse_tensors(body[:head])["outputs"]:
            datatype, size = DATATYPES[said["datatype"]], said.get("parameters", {}).get("binary_data_size")
            if size is None:
                array = array_of(said["data"], datatype, f"output '{said['name']}'")
            else:
                array = np.frombuffer(body, datatype.numpy, size // datatype.itemsize, place)
                place += size
            outputs[said["name"]] = array.reshape(said["shape"])
    except (BadRequest, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"it is not the V2 protocol's: {type(error).__name__}: {error}") from None
    return outputs


def _described(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": name_of(array.dtype)}
