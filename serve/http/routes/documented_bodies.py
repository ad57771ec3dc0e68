"""The bodies that the routes read by themselves, for the OpenAPI document: what they may hold, and an example of each.

The routes take bytes (`routes/app.py`), so that FastAPI knows none of it.
"""

from typing import Any

Schema = dict[str, Any]
JSON, FORM = "application/json", "multipart/form-data"
_TEXT: Schema = {"type": "string"}
_SETTINGS: Schema = {
    "type": "object",
    "description": "n_epochs, batch_size, learning_rate and the others of docs/finetune.md",
}
_JOB: Schema = {
    "type": "object",
    "required": ["model", "training_file"],
    "properties": {
        "model": {**_TEXT, "description": "NAME, or NAME@VERSION"},
        "training_file": {**_TEXT, "description": "the id of an uploaded file"},
        "validation_file": {
            "type": ["string", "null"],
            "description": "held out; by default a part of the rows",
        },
        "hyperparameters": _SETTINGS,
        "seed": {"type": ["integer", "null"]},
        "suffix": {"type": ["string", "null"], "description": "a name for the job"},
        "metadata": {"type": ["object", "null"], "description": "texts by name, to find the job by"},
    },
}
_LOAD: Schema = {
    "type": "object",
    "properties": {
        "parameters": {
            "type": "object",
            "properties": {
                "config": {**_TEXT, "description": "settings until the next load, as JSON in a text"}
            },
        }
    },
}
_UPLOAD: Schema = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"enum": ["fine-tune"]},
        "file": {
            **_TEXT,
            "format": "binary",
            "description": "safetensors, npz, Parquet, CSV, JSON lines or a tar of pictures; targets: `target:OUTPUT`",
        },
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {**_TEXT, "description": "then the file is deleted"},
    },
}
_INSTANCES = {"instances": [[5.1, 3.5, 1.4, 0.2]]}
_TENSORS = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [5.1, 3.5, 1.4, 0.2]}]}
_A_JOB = {"model": "mymodel", "training_file": "file-…", "hyperparameters": {"n_epochs": 4}}
_SHARE = {"version": 3, "percent": 5}
# For each path the content types of its POST: the schema, None where the route has its own, and the example.
_BODIES: dict[str, dict[str, tuple[Schema | None, Any]]] = {
    "/v1/models/{m}:predict": {JSON: (None, _INSTANCES), FORM: (None, {"file": "@picture.png"})},
    "/v1/models/{m}/versions/{v}:predict": {JSON: (None, _INSTANCES)},
    "/v1/models/{m}:endpoint": {JSON: ({}, {"text": "what preprocess takes"})},
    "/v2/models/{m}/infer": {JSON: (None, _TENSORS)},
    "/v2/models/{m}/versions/{v}/infer": {JSON: (None, _TENSORS)},
    "/v1/models/{m}/promote": {JSON: (None, {"version": 3})},
    "/v1/models/{m}/canary": {JSON: (None, _SHARE)},
    "/v1/models/{m}/shadow": {JSON: (None, _SHARE)},
    "/v2/repository/index": {
        JSON: ({"type": "object", "properties": {"ready": {"type": "boolean"}}}, {"ready": True})
    },
    "/v2/repository/models/{m}/load": {JSON: (_LOAD, {"parameters": {"config": '{"max_batch_size": 16}'}})},
    "/v1/files": {FORM: (_UPLOAD, {"purpose": "fine-tune", "file": "@rows.npz"})},
    "/v1/fine_tuning/jobs": {JSON: (_JOB, _A_JOB)},
    "/v1/fine_tuning/jobs/validate": {JSON: (_JOB, _A_JOB)},
}


def add_bodies(paths: dict[str, Any]) -> None:
    """Write the bodies into the document's operations, those that this server has."""
    for path, bodies in _BODIES.items():
        if path in paths:
            content = paths[path]["post"].setdefault("requestBody", {}).setdefault("content", {})
            for kind, (schema, example) in bodies.items():
                entry = content.setdefault(kind, {})
                entry |= {"example": example} | ({"schema": schema} if schema is not None else {})
