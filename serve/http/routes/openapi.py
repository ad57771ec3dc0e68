"""The OpenAPI document's parts that FastAPI does not know: the infer route, which is answered in front of the
application, and the bodies that other routes read by themselves, with an example of each.

Source: Open Inference Protocol V2, "Inference Request JSON Object" and "Inference Response JSON Object"; Triton's
extensions for binary tensors, classification and schedule policy. ``deterministic`` and ``nan_as`` are ours.
"""

from collections.abc import Callable
from typing import Any

from ....models.spec.datatypes import DATATYPES
from ..codecs.infer_parameters import NAN_AS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
JSON, FORM = "application/json", "multipart/form-data"


def _object(required: list[str], **properties: Schema) -> Schema:
    needed = {"required": required} if required else {}
    return {"type": "object", **needed, "properties": properties}


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


_JOB = _object(
    ["model", "training_file"],
    model={**_TEXT, "description": "NAME, or NAME@VERSION"},
    training_file={**_TEXT, "description": "the id of an uploaded file"},
    validation_file={"type": ["string", "null"], "description": "held out; by default a part of the rows"},
    hyperparameters={
        "type": "object",
        "description": "n_epochs, batch_size, learning_rate and the others of docs/finetune.md",
    },
    seed={"type": ["integer", "null"]},
    suffix={"type": ["string", "null"], "description": "a name for the job"},
    metadata={"type": ["object", "null"], "description": "texts by name, to find the job by"},
)
_SETTINGS_OF_LOAD = {**_TEXT, "description": "settings until the next load, as JSON in a text"}
_LOAD = _object([], parameters=_object([], config=_SETTINGS_OF_LOAD))
_FILE = {
    **_TEXT,
    "format": "binary",
    "description": "safetensors, npz, Parquet, CSV, JSON lines or a tar of pictures; targets: `target:OUTPUT`",
}
_UPLOAD = _object(
    ["purpose", "file"],
    purpose={"enum": ["fine-tune"]},
    file=_FILE,
    **{
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {**_TEXT, "description": "then the file is deleted"},
    },
)
_INSTANCES = {"instances": [[5.1, 3.5, 1.4, 0.2]]}
_TENSORS = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [5.1, 3.5, 1.4, 0.2]}]}
_A_JOB = {"model": "mymodel", "training_file": "file-…", "hyperparameters": {"n_epochs": 4}}
_SHARE = {"version": 3, "percent": 5}
# The content types of each path's POST: the schema, None where the route has its own, and the example.
_BODIES: dict[str, dict[str, tuple[Schema | None, Any]]] = {
    "/v1/models/{m}:predict": {JSON: (None, _INSTANCES), FORM: (None, {"file": "@picture.png"})},
    "/v1/models/{m}/versions/{v}:predict": {JSON: (None, _INSTANCES)},
    "/v1/models/{m}:endpoint": {JSON: ({}, {"text": "what preprocess takes"})},
    "/v2/models/{m}/infer": {JSON: (None, _TENSORS)},
    "/v2/models/{m}/versions/{v}/infer": {JSON: (None, _TENSORS)},
    "/v1/models/{m}/promote": {JSON: (None, {"version": 3})},
    "/v1/models/{m}/canary": {JSON: (None, _SHARE)},
    "/v1/models/{m}/shadow": {JSON: (None, _SHARE)},
    "/v2/repository/index": {JSON: (_object([], ready=_FLAG), {"ready": True})},
    "/v2/repository/models/{m}/load": {JSON: (_LOAD, {"parameters": {"config": '{"max_batch_size": 16}'}})},
    "/v1/files": {FORM: (_UPLOAD, {"purpose": "fine-tune", "file": "@rows.npz"})},
    "/v1/fine_tuning/jobs": {JSON: (_JOB, _A_JOB)},
    "/v1/fine_tuning/jobs/validate": {JSON: (_JOB, _A_JOB)},
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


def add_bodies(paths: dict[str, Any]) -> None:
    """Write the bodies into the document's operations, those that this server has."""
    for path, bodies in _BODIES.items():
        if path in paths:
            content = paths[path]["post"].setdefault("requestBody", {}).setdefault("content", {})
            for kind, (schema, example) in bodies.items():
                entry = content.setdefault(kind, {})
                entry |= {"example": example} | ({"schema": schema} if schema is not None else {})
