"""What the store knows about versions, in the words of the HTTP routes."""

from pathlib import Path
from typing import Any

from ..exporters.evidence import facts_of
from ..models.errors import UnknownName
from ..models.store import Store, Version
from .app import History


def history_of(store: Store) -> History:
    """The store behind ``/v1/models/{m}/versions…``."""

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
        report=lambda model, number: version_of(store, model, number).file("report.html").read_text(),
        plan=lambda model, number: version_of(store, model, number).json("precision.json"),
        lineage=lambda model, number: _lineage(store, version_of(store, model, number)),
        rollback=rollback,
    )


def version_of(store: Store, model: str, number: str) -> Version:
    """Raises UnknownName with what there is."""
    if model not in store.names():
        raise UnknownName(f"no model '{model}' in the store: it has {store.names()}")
    if not (number.isascii() and number.isdigit()):
        raise UnknownName(f"'{model}' has no version {number!r}: it has {store.numbers(model)}")
    return store.version(model, int(number))


def promote(store: Store, model: str, number: str) -> dict[str, Any]:
    """Put a version on duty; its facts. Raises UnknownName, Conflict for a refused version."""
    version = version_of(store, model, number)
    store.promote(version)
    return facts_of(version)


def _lineage(store: Store, version: Version) -> dict[str, Any]:
    keys = ("model", "parent", "lineage", "environment", "created", "fingerprint", "files")
    facts = {"version": version.number, "digest": version.digest}
    return facts | {key: version.manifest[key] for key in keys} | {"promotions": _promotions(store, version)}


def _promotions(store: Store, version: Version) -> list[dict[str, Any]]:
    """The first and the last time that it was put on duty: by whom, over which version. ``stale_parent`` names the
    version that it was made from where that was not the one on duty any more."""
    found = store.promotions(version.name).get(version.number, {})
    told = [dict(found[key]) for key in ("first", "last") if key in found]
    parent = version.manifest.get("parent")
    if told and version.awaits_promotion and told[0]["over"] not in (None, parent):
        told[0]["stale_parent"] = parent
    return told[:1] if len(told) == 2 and found["first"] == found["last"] else told


def store_at(path: Path) -> Store:
    """The store at a path that may not exist yet."""
    return Store(path.expanduser().resolve())
