"""What the store knows about versions, in the words of the HTTP routes."""

from pathlib import Path
from typing import Any

from ..exporters.evidence import facts_of
from ..models.errors import UnknownName
from ..models.store import Store, Version
from .app import History


def history_of(store: Store) -> History:
    """The store behind ``/v1/models/{m}/versions…``."""

    def find(model: str, number: str) -> Version:
        if model not in store.names():
            raise UnknownName(f"no model '{model}' in the store: it has {store.names()}")
        if not (number.isascii() and number.isdigit()):
            raise UnknownName(f"'{model}' has no version {number!r}: it has {store.numbers(model)}")
        return store.version(model, int(number))

    def versions(model: str) -> list[dict[str, Any]]:
        if model not in store.names():
            raise UnknownName(f"no model '{model}' in the store: it has {store.names()}")
        live = store.live_number(model)
        return [
            facts_of(version) | {"live": version.number == live, "created": version.manifest.get("created")}
            for version in (store.version(model, number) for number in store.numbers(model))
        ]

    def rollback(model: str) -> dict[str, Any]:
        return facts_of(store.rollback(model))

    return History(
        versions=versions,
        report=lambda model, number: find(model, number).bytes("report.html").decode(),
        plan=lambda model, number: find(model, number).json("precision.json"),
        lineage=lambda model, number: _lineage(find(model, number)),
        rollback=rollback,
    )


def _lineage(version: Version) -> dict[str, Any]:
    keys = ("model", "parent", "lineage", "environment", "created", "fingerprint", "files")
    return {"version": version.number, "digest": version.digest} | {
        key: version.manifest[key] for key in keys
    }


def store_at(path: Path) -> Store:
    """The store at a path that may not exist yet."""
    return Store(path.expanduser().resolve())
