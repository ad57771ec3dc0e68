"""Turns dataclasses into JSON objects, which have the fields by name."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def finite(value: float | None) -> float | None:
    """The number as JSON may hold it: null where it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def as_json(value: Any) -> Any:
    """The value as JSON may hold it, and all that is in it: null for NaN and infinity, lists for tuples."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, JsonFields):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: as_json(one) for key, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, tuple | list) else value


class JsonFields:
    """The base class of dataclasses that become JSON objects; `to_json` gives the fields in the order of the class."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        assert is_dataclass(self)
        return {field.name: as_json(getattr(self, field.name)) for field in fields(self)}
