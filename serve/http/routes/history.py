"""Facts of the store about versions, as the HTTP routes give them."""

from pathlib import Path
from typing import Any

from ....exporters.device_proofs import proofs_of
from ....exporters.evidence import facts_of
from ....exporters.report.stored_page import served_page
from ....models.errors import DamagedFile, StoreUnusable, UnknownName
from ....models.store import Store, Version
from .app import History


def history_of(store: Store) -> History:
    """The store behind ``/v1/models/{m}/versions…``."""

    def versions(model: str) -> list[dict[str, Any]]:
        if model not in store.names():
            raise UnknownName.of_model(model, store.names())
        live = store.live_number(model)
        return [_listed(store, model, number) | {"live": number == live} for number in store.numbers(model)]

    def rollback(model: str) -> dict[str, Any]:
        return facts_of(store.rollback(model))

    return History(
        versions=versions,
        report=lambda model, number: _report(version_of(store, model, number)),
        plan=lambda model, number: version_of(store, model, number).json("precision.json"),
        lineage=lambda model, number: _lineage(store, version_of(store, model, number)),
        rollback=rollback,
    )


def _report(version: Version) -> str:
    """The page of the conversion, with the way back and what the gate found on other devices since."""
    return served_page(version, proofs_of(version))


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


def damaged_files(store: Store, model: str) -> list[str]:
    """The faults of a model's files, a sentence each: of its manifests, and of every file of the active version.

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
        try:
            version.opened(file).close()
        except DamagedFile as error:
            found.append(str(error))
    return found


def version_of(store: Store, model: str, number: str) -> Version:
    """A version by model and number. Raises UnknownName, whose message lists the models or versions that there are."""
    if model not in store.names():
        raise UnknownName.of_model(model, store.names())
    return store.numbered(model, number)


def promote(store: Store, model: str, number: str) -> dict[str, Any]:
    """Make this version the active one; gives its facts. Raises UnknownName, Conflict for a refused version."""
    version = version_of(store, model, number)
    store.promote(version)
    return facts_of(version)


def _lineage(store: Store, version: Version) -> dict[str, Any]:
    keys = ("parent", "lineage", "environment", "created", "fingerprint", "files")
    facts = {"model": version.name, "version": version.number, "digest": version.digest}
    return (
        facts | {key: version.manifest.get(key) for key in keys} | {"promotions": _promotions(store, version)}
    )


def _promotions(store: Store, version: Version) -> list[dict[str, Any]]:
    """The first and the last time that the version was made active: by whose order, in place of which version.
    ``stale_parent`` is the version that it was made from, where that was not the active one any more."""
    found = store.promotions(version.name).get(version.number, {})
    active_times = [dict(found[key]) for key in ("first", "last") if key in found]
    parent = version.manifest.get("parent")
    if active_times and version.awaits_promotion and active_times[0]["over"] not in (None, parent):
        active_times[0]["stale_parent"] = parent
    return active_times[:1] if len(active_times) == 2 and found["first"] == found["last"] else active_times


def store_at(path: Path, writes: str = "", in_state: bool = False) -> Store:
    """The store at a path that may not exist yet. ``writes``: what the command keeps there; ``in_state``: a server that
    only reads the store takes it from its state folder. Raises StoreUnusable where the command could not use it."""
    store = Store(path.expanduser().resolve())
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
