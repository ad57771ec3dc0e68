"""model.toml as a JSON Schema, for editors and for programs that write one: from the same keys as its readers."""

from typing import Any

from halfeven.models.folder.model_keys import MAX_RANK, MAX_TENSORS, TOP, Key, Keys

SCHEMA_ID = "urn:halfeven:model.toml"
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_LONGEST = {"inputs": MAX_TENSORS, "outputs": MAX_TENSORS, "shape": MAX_RANK}


def model_schema() -> dict[str, Any]:
    """Draft 2020-12. What one key says of another (a batch axis within the shape), and whether a file exists, only the
    readers know: they refuse more than the schema does."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "model.toml of halfeven",
        **_table(TOP),
    }


def _table(keys: Keys) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _value(name, key) for name, key in keys.items()},
        "required": [name for name, key in keys.items() if key.needed],
        "additionalProperties": False,
    }


def _value(name: str, key: Key) -> dict[str, Any]:
    said: dict[str, Any] = {"type": _TYPES[key.kind]}
    if key.keys is not None:
        inside = _table(key.keys)
        if key.kind is list:
            said |= {"items": inside} | ({"minItems": 1} if key.needed else {})
        else:
            said = {"type": "object", "additionalProperties": inside} if key.named else inside
    bounds = {"minimum": key.least, "maximum": key.most, "maxItems": _LONGEST.get(name), "items": key.items}
    said |= {word: value for word, value in bounds.items() if value is not None}
    said |= {"enum": list(key.one_of)} if key.one_of else {}
    said |= {"pattern": f"^(?:{key.pattern})$"} if key.pattern else {}
    if key.also is not None:
        said = {"anyOf": [said, dict(key.also)]}
    default = {} if key.default is None or not _fits(key) else {"default": key.default}
    return {"description": key.meaning, **said, **default}


def _fits(key: Key) -> bool:
    """True if the default is a value, and no sentence about it."""
    return isinstance(key.default, key.kind) or key.also is not None or key.kind is float
