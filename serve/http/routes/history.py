"""Facts of the store about versions, as the HTTP routes give them."""

from typing import Any

from ....exporters.on_device.device_proofs import proofs_of
from ....exporters.report.stored_page import served_page
from ....exporters.report.version_facts import facts_of
from ....models.store.store import Store, Version
from ...versions.versions_in_store import versions_of
from .app import History


def history_of(store: Store) -> History:
    """The store behind ``/v1/models/{m}/versions…``."""

    def rollback(model: str) -> dict[str, Any]:
        return facts_of(store.rollback(model))

    return History(
        versions=lambda model: versions_of(store, model),
        report=lambda model, number: _report(store.numbered(model, number)),
        plan=lambda model, number: store.numbered(model, number).json("precision.json"),
        lineage=lambda model, number: _lineage(store, store.numbered(model, number)),
        rollback=rollback,
    )


def _report(version: Version) -> str:
    """The page of the conversion, with the way back and what the gate found on other devices since."""
    return served_page(version, proofs_of(version))


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
