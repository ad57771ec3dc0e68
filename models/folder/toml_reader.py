"""Reads tables and values of a parsed TOML file strictly: every fault is a sentence that names the file and the key."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import BadFolder
from ..nearest_name import nearest_name
from .model_keys import Key

_KINDS = {
    str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a table",
}  # fmt: skip


class TomlReader:
    """The reader of one file, whose name is in every message. All methods raise BadFolder."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def table(
        self, data: Mapping[str, Any], key: str, fields: Mapping[str, Key], where: str = ""
    ) -> dict[str, Any]:
        """A table with its values, each of the type, the words and the range that its key has."""
        place = f"{where}.{key}" if where else key
        table = data.get(key, {})
        if not isinstance(table, dict):
            raise self.error(f"[{place}]: expected a table, got {table!r}")
        self.known(table, fields, place)
        found = {name: self.typed(table, name, fields[name].kind, place) for name in table}
        for name, value in found.items():
            self.held(value, fields[name], f"[{place}] {name}")
        return found

    def held(self, value: Any, key: Key, where: str) -> None:
        """Raises BadFolder for a word that is none of the key's, and for a number outside of its range."""
        if key.one_of:
            one_of(value, key.one_of, f"{self.file}: {where}")
        if key.kind not in (int, float) or key.least is key.most is None:
            return
        least, most = (-math.inf if key.least is None else key.least), key.most
        if not least <= value <= (math.inf if most is None else most) or math.isinf(value):
            number = "a finite number" if key.kind is float else "a number"
            expected = (
                f"{number} of at least {least:g}" if most is None else f"a number from {least:g} to {most:g}"
            )
            raise self.error(f"{where} = {value}: expected {expected}")

    def typed(self, data: Mapping[str, Any], key: str, kind: type, where: str = "") -> Any:
        place = f"{where}.{key}" if where else key
        if key not in data:
            raise self.error(f"the key '{place}' is missing: expected {_KINDS[kind]}")
        value = data[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{place} = {value!r}: expected {_KINDS[kind]}")
        return value

    def existing(self, value: Any, key: str, default: str | None) -> Path | None:
        """The path that a key names inside the folder; the default only where it exists. The last part of it may be a
        link to a regular file, as a download cache keeps weights."""
        if value is None:
            path = self.file.parent / (default or "")
            return path if default and path.is_file() else None
        if not isinstance(value, str):
            raise self.error(f"{key} = {value!r}: expected a file name")
        place, path = PurePosixPath(value), self.file.parent / value
        if place.is_absolute() or ".." in place.parts:
            raise self.error(f"{key} = {value!r}: it lies outside of the folder; expected a file in it")
        if not path.is_file():
            raise self.error(f"{key} = {value!r}: there is no such file in {self.file.parent}")
        return path

    def strings(self, value: Any, key: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key} = {value!r}: expected a list of strings")
        return value

    def known(self, data: Mapping[str, Any], fields: Iterable[str], where: str) -> None:
        fields = list(fields)
        for key in data:
            if key not in fields:
                near = nearest_name(key, fields)
                place = f"[{where}] " if where else ""
                raise self.error(f"{place}the key '{key}' is unknown; the nearest known key is '{near}'")

    def error(self, message: str) -> BadFolder:
        return BadFolder(f"{self.file}: {message}")


def one_of(value: str, known: Iterable[str], where: str) -> None:
    known = list(known)
    if value not in known:
        near = nearest_name(str(value), known)
        raise BadFolder(f"{where} = {value!r}: expected one of {', '.join(known)}; did you mean {near!r}?")
