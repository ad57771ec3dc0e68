"""Versions as commands and routes find them in a store: without torch, so that a command that only looks is quick."""

from pathlib import Path
from typing import Any

from ...exporters.report.version_facts import facts_of
from ...models.errors import DamagedFile, StoreUnusable, UnknownName
from ...models.files.home_folder import at_home
from ...models.store.store import Store, Version


def versions_of(store: Store, model: str) -> list[dict[str, Any]]:
    """The facts of each version of a model; ``live`` of the active one is true. Raises UnknownName, DamagedFile."""
    numbers, live = store.known(model), store.live_number(model)
    return [_listed(store, model, number) | {"live": number == live} for number in numbers]


def _listed(store: Store, model: str, number: int) -> dict[str, Any]:
    """One version's facts; a version whose manifest cannot be read is listed as ``damaged``, with the reason."""
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


def damaged_files(store: Store, model: str, every_byte: bool) -> list[str]:
    """The faults of a model's files, a sentence each: of its manifests, and of files of the active version that are
    missing; with ``every_byte`` also of those that were changed, for which all are read.

    The files of older versions are not read: they may be many, and large.
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
        path = version.folder / file
        if not every_byte and path.is_file() and not path.is_symlink():
            continue
        try:
            version.opened(file).close()
        except DamagedFile as error:
            found.append(str(error))
    return found


def promote(store: Store, model: str, number: str) -> dict[str, Any]:
    """Make this version the active one; gives its facts. Raises UnknownName, Conflict for a refused version."""
    version = store.numbered(model, number)
    store.promote(version)
    return facts_of(version)


def store_at(path: Path, writes: str = "", in_state: bool = False) -> Store:
    """The store at a path that may not exist yet. ``writes``: what the command keeps there; ``in_state``: a server that
    only reads the store takes it from its state folder. Raises StoreUnusable where the command could not use it."""
    store = Store(at_home(path).resolve())
    try:
        store.check(writes)
    except StoreUnusable as error:
        if not in_state:
            raise
        words = (
            "a server that only reads this store takes it from its folder --state: give that one as --store"
        )
        raise StoreUnusable(f"{error}; {words}") from error
    return store


def version_called(target: str, store: Store) -> Version:
    """The version that NAME (the live one) or NAME@VERSION means. Raises UnknownName."""
    name, _, number = target.partition("@")
    if not store.numbers(name):
        raise UnknownName(
            f"{target!r} is neither a model folder nor a model of the store: it has {store.names()}"
        )
    if number:
        return store.numbered(name, number)
    version = store.live(name) or store.newest(name)
    assert version is not None
    return version
