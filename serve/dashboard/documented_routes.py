"""The routes as people read them: every operation of the OpenAPI document with its parameters, bodies and a command."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_PLACES = {"m": "MODEL", "v": "VERSION", "id": "ID"}


def documented_routes(document: Schema, server: str, needs_key: bool) -> dict[str, list[dict[str, Any]]]:
    """The operations by group, in the document's order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            groups.setdefault(one["tags"][0], []).append(
                {
                    "method": method.upper(),
                    "path": path,
                    "sentence": one.get("description") or one.get("summary", ""),
                    "parameters": list(_parameters(one)),
                    "bodies": list(_bodies(one)),
                    "curl": _curl(method.upper(), path, one, server, needs_key),
                }
            )
    return groups


def _parameters(one: Schema) -> Iterator[dict[str, Any]]:
    for parameter in one.get("parameters", ()):
        schema = parameter.get("schema", {})
        yield {
            "name": parameter["name"],
            "place": parameter["in"],
            "type": _type(schema),
            "required": parameter.get("required", False),
            "default": schema.get("default"),
            "text": parameter.get("description", ""),
        }


def _type(schema: Schema) -> str:
    kinds = [schema, *schema.get("anyOf", ())]
    named = [str(kind["type"]) for kind in kinds if kind.get("type") not in (None, "null")]
    values = [json.dumps(value) for kind in kinds for value in kind.get("enum", ())]
    ends = [
        f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema
    ]
    return " ".join([" or ".join(values or named), *ends])


def _bodies(one: Schema) -> Iterator[dict[str, Any]]:
    for kind, content in one.get("requestBody", {}).get("content", {}).items():
        schema = content.get("schema", {})
        needed = schema.get("required", ())
        fields = [
            {
                "name": name,
                "type": _type(field),
                "required": name in needed,
                "text": field.get("description", ""),
            }
            for name, field in schema.get("properties", {}).items()
        ]
        example = content.get("example")
        yield {
            "kind": kind,
            "fields": fields,
            "text": schema.get("description", ""),
            "example": json.dumps(example, indent=2) if example is not None else None,
        }


def _curl(method: str, path: str, one: Schema, server: str, needs_key: bool) -> str:
    """A command that sends the operation; names in capitals are to be replaced."""
    filled = re.sub(r"\{(\w+)\}", lambda found: _PLACES.get(found[1], found[1].upper()), path)
    parts = ["curl"]
    if needs_key:
        parts.append('-H "Authorization: Bearer $HALFEVEN_API_KEY"')
    content = one.get("requestBody", {}).get("content", {})
    example = content.get("application/json", {}).get("example")
    form = content.get("multipart/form-data", {}).get("example")
    if example is not None:
        parts.append(f"--json {shlex.quote(json.dumps(example))}")
    elif form is not None:
        parts += [f"-F {shlex.quote(f'{name}={value}')}" for name, value in form.items()]
    elif method != "GET":
        parts.append(f"-X {method}")
    return " ".join([*parts, shlex.quote(server + filled)])
