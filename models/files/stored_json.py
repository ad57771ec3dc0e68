"""Small files that were written to the store, and may be damaged or replaced since: texts and JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from .opened_file import OpenedFile

T = TypeVar("T")
MOST_BYTES = 64 * 2**20
Opener = Callable[[Path, int | None], OpenedFile]


def stored_bytes(path: Path, opener: Opener = OpenedFile) -> bytes:
    """All bytes of a file of the store. Raises OSError, also for what is no regular file (a pipe would be waited for
    without end), a symbolic link (except with ``opener`` `opened_named`), or larger than `MOST_BYTES`."""
    with opener(path, MOST_BYTES) as opened:
        return opened.read()


def stored_json(path: Path, opener: Opener = OpenedFile) -> Any:
    """The value in a file of the store. Raises OSError as `stored_bytes`, ValueError as `json_of`."""
    return json_of(stored_bytes(path, opener))


def json_of(text: bytes) -> Any:
    """The value. Raises ValueError for what is no JSON, for a number that is not finite (nothing writes one, and
    `json.dumps` would refuse it far from here), and for what is nested too deep to be read."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"it holds {text[:40]}, expected finite numbers alone")
    return number


def typed(kind: type[T], value: Any) -> T:
    """The value. Raises TypeError where it is of another kind: used, it would fail far from here."""
    if type(value) not in ((int, float) if kind is float else (kind,)):
        raise TypeError(f"expected {kind.__name__}, got {str(value)[:40]!r}")
    return value


def all_typed(defaults: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The data. Raises TypeError where a value is not of the kind of its default; None stands for a number."""
    for name, default in asdict(defaults).items():
        if name in data and default != "auto" and data[name] != default:
            kind = {tuple: list, type(None): float}.get(type(default), type(default))
            typed(kind, data[name])
    return dict(data)
