"""The infer route's part of the OpenAPI document: it is answered in front of the application that knows the others.

Source: Open Inference Protocol V2, "Inference Request JSON Object" and "Inference Response JSON Object"; Triton's
extensions for binary tensors, classification and schedule policy. ``deterministic`` and ``nan_as`` are ours.
"""

from collections.abc import Callable
from typing import Any

from ....models.spec.datatypes import DATATYPES
from ..codecs.infer_parameters import NAN_AS
from .documented_bodies import add_bodies

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _parameters(**known: Schema) -> Schema:
    """The schema of flat parameters; unknown keys are the caller's own."""
    return {
        "type": "object",
        "properties": known,
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }


def _tensor(datatypes: list[str]) -> Schema:
    """``data`` is flat or nested to the shape; without it the tensor is binary, behind the JSON."""
    return _object(
        ["name", "shape", "datatype"],
        name=_TEXT,
        shape={"type": "array", "items": _COUNT},
        datatype={"enum": datatypes},
        data={"type": "array"},
        parameters=_parameters(binary_data_size=_COUNT),
    )


_ASKED = _object(["name"], name=_TEXT, parameters=_parameters(binary_data=_FLAG, classification=_COUNT))
_TERMS = _parameters(
    priority=_COUNT,
    timeout={**_COUNT, "description": "microseconds that the request may wait; 0: no limit"},
    binary_data_output=_FLAG,
    deterministic={**_FLAG, "description": "the answer does not depend on the other requests of its batch"},
    nan_as={"enum": list(NAN_AS), "description": "how JSON writes numbers that are not finite"},
)
_REQUEST = _object(
    ["inputs"],
    id=_TEXT,
    inputs={"type": "array", "minItems": 1, "items": _tensor(list(DATATYPES))},
    outputs={"type": "array", "items": _ASKED},
    parameters=_TERMS,
)
_RESPONSE = _object(
    ["model_name", "model_version", "outputs"],
    id=_TEXT,
    model_name=_TEXT,
    model_version=_TEXT,
    parameters=_parameters(halfeven_precision=_TEXT, halfeven_digest=_TEXT),
    outputs={"type": "array", "items": _tensor([*DATATYPES, "BYTES"])},
)
_BINARY: Schema = {"type": "string", "format": "binary", "description": "the JSON, then the binary tensors"}
_HEADER = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "how many bytes of a binary body are JSON; 0: the body is the one input",
    "schema": _COUNT,
}
_ERROR = {"application/json": {"schema": _object(["error"], error=_TEXT)}}
_INFER: Schema = {
    "tags": ["predict"],
    "summary": "Infer",
    "description": "Open Inference Protocol V2 inference: JSON, or JSON followed by binary tensors.",
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _REQUEST},
            "application/octet-stream": {"schema": _BINARY},
        },
    },
    "responses": {
        "200": {
            "description": "the outputs",
            "content": {
                "application/json": {"schema": _RESPONSE},
                "application/octet-stream": {"schema": _BINARY},
            },
        },
        "4XX": {
            "description": "what was wrong with the request",
            "content": _ERROR,
        },
        "503": {
            "description": "it would wait too long, or nothing is ready",
            "headers": {"Retry-After": {"description": "seconds", "schema": _COUNT}},
            "content": _ERROR,
        },
    },
}


def with_infer(openapi: Callable[[], Schema]) -> Callable[[], Schema]:
    """The application's OpenAPI document with the route that is answered in front of it, and every body."""

    def document() -> Schema:
        schema = openapi()
        for path, names in (
            ("/v2/models/{m}/infer", ["m"]),
            ("/v2/models/{m}/versions/{v}/infer", ["m", "v"]),
        ):
            places = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
            schema["paths"][path] = {"post": {**_INFER, "parameters": [*places, _HEADER]}}
        add_bodies(schema["paths"])
        return schema

    return document
