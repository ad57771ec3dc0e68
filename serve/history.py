"""What the store knows about versions, in the words of the HTTP routes."""

from pathlib import Path
from typing import Any

from ..exporters.evidence import facts_of
from ..models.errors import DamagedFile, UnknownName
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
        return [_listed(store, model, number) | {"live": number == live} for number in store.numbers(model)]

    def rollback(model: str) -> dict[str, Any]:
        return facts_of(store.rollback(model))

    return History(
        versions=versions,
        report=lambda model, number: find(model, number).bytes("report.html").decode(),
        plan=lambda model, number: find(model, number).json("precision.json"),
        lineage=lambda model, number: _lineage(find(model, number)),
        rollback=rollback,
    )


def _listed(store: Store, model: str, number: int) -> dict[str, Any]:
    """One version's facts; one whose manifest cannot be read is listed too, as ``damaged``, with the reason."""
    try:
        version = store.version(model, number)
        try:
            return facts_of(version) | {"created": version.manifest.get("created")}
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(
                f"{version.folder / 'manifest.json'} lacks what a manifest holds ({type(error).__name__}: {error}); "
                "convert the model again"
            ) from error
    except DamagedFile as error:
        reason = str(error)
    return {
        "model": model,
        "version": number,
        "digest": None,
        "status": "damaged",
        "reason": reason,
        "notes": [],
        "forms": {},
        "created": None,
    }


def damaged_files(store: Store, model: str) -> list[str]:
    """What is wrong with a model's files, a sentence each: its manifests, and every file of what is on duty.

    The files of the versions before it are not read: they may be many, and large.
    """
    found = [
        facts["reason"]
        for number in store.numbers(model)
        if (facts := _listed(store, model, number))["status"] == "damaged"
    ]
    try:
        version = store.live(model)
    except (DamagedFile, UnknownName) as error:
        return found if str(error) in found else [*found, str(error)]
    if version is None:
        return found
    for file in version.manifest["files"]:
        try:
            version.opened(file).close()
        except DamagedFile as error:
            found.append(str(error))
    return found


def _lineage(version: Version) -> dict[str, Any]:
    keys = ("model", "parent", "lineage", "environment", "created", "fingerprint", "files")
    return {"version": version.number, "digest": version.digest} | {
        key: version.manifest[key] for key in keys
    }


def store_at(path: Path, writes: bool = False) -> Store:
    """The store at a path that may not exist yet. Raises StoreUnusable where the command could not use it."""
    store = Store(path.expanduser().resolve())
    store.check(writes)
    return store
