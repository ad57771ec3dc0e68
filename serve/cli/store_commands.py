"""The commands about the versions of a store: they read and move small files, and import no torch."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ...models.errors import BadInput, DamagedFile
from .console import DEFAULT_STORE, Ended, StoreAt, command, listing, notify

if TYPE_CHECKING:
    from ...models.store.store import Store

_LONGEST_REASON = 120  # in the table; the full sentence is in --json and in the report


def version_named(target: str) -> tuple[str, str]:
    """The name and the number in NAME@VERSION. Raises BadInput."""
    name, _, number = target.partition("@")
    if not number:
        raise BadInput(f"{target!r}: expected NAME@VERSION; `halfeven models` lists the versions")
    return name, number


@command
def models(
    store: StoreAt = DEFAULT_STORE,
    check: Annotated[
        bool, typer.Option("--check", help="Also read every file of the active versions: was it changed?")
    ] = False,
) -> Ended:
    """List what is in the store, and the precision in which each active version was served last."""
    from ..versions.versions_in_store import damaged_files, store_at

    opened = store_at(store)
    damaged = {name: faults for name in opened.names() if (faults := damaged_files(opened, name, check))}
    found = {name: _versions(opened, name) for name in opened.names()}
    table = listing("model", "version", "served", "status", "forms", "reason")
    for name, versions in found.items():
        for version in versions:
            forms = ", ".join(f for f, facts in version["forms"].items() if facts["passed"]) or "-"
            number = f"{version['version']}{' ●' if version['live'] else ''}"
            reason = textwrap.shorten(version["reason"], _LONGEST_REASON, placeholder=" …")
            cells = (name, number, _served(version), version["status"], forms, reason)
            table.add_row(*map(Text, cells))
    table.caption = "●: the active version. served: its precision, form and device at its last activation"
    table.caption_justify = "left"
    for name, faults in damaged.items():
        for fault in faults:
            notify(f"damaged: {name}: {fault}")
    way = f"`halfeven convert FOLDER --store {opened.root}` puts one there"
    none = f"the store {opened.root} has no model yet; {way}"
    return {"models": found, "damaged": damaged}, table if found or damaged else none, 0


def _versions(store: "Store", name: str) -> list[dict[str, Any]]:
    """The facts of a model's versions. ``served``: the precision, form and device of the active one's last activation;
    None where no server made it active."""
    from ..versions.orders import last_activation
    from ..versions.versions_in_store import versions_of

    try:
        versions = versions_of(store, name)
    except DamagedFile:  # which version is active cannot be read; it is among the damaged
        return []
    last = last_activation(store, name) or {}
    served = {key: last.get(key) for key in ("precision", "form", "device")}
    return [
        version
        | {"served": served if version["live"] and last.get("version") == version["version"] else None}
        for version in versions
    ]


def _served(version: Mapping[str, Any]) -> str:
    if served := version["served"]:
        return "{precision} {form} {device}".format(**served)
    return "not yet" if version["live"] else ""


@command
def rollback(
    name: Annotated[str, typer.Argument(help="The model.")],
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Make active the newest of the older versions that may serve; a running server follows within two seconds."""
    from ...exporters.report.version_facts import facts_of
    from ..versions.versions_in_store import store_at

    facts = facts_of(store_at(store, "which version is active").rollback(name))
    return facts, f"{name}@{facts['version']} is active", 0


@command
def promote_version(
    target: Annotated[
        str,
        typer.Argument(help="NAME@VERSION: a version that was not refused, also one that a job left held."),
    ],
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Make a version the active one by hand; a running server follows within two seconds."""
    from ..versions.versions_in_store import promote, store_at

    name, number = version_named(target)
    facts = promote(store_at(store, "which version is active"), name, number)
    return facts, f"{target} is active", 0


@command
def backup(
    folder: Annotated[Path, typer.Argument(help="A new or an empty folder.")],
    store: StoreAt = DEFAULT_STORE,
) -> Ended:
    """Copy a store, also one that a server uses: models, keys, uploads, jobs. To restore: `serve --store FOLDER`."""
    from ..backup import back_up
    from ..versions.versions_in_store import store_at

    facts = back_up(store_at(store), folder, notify)
    for fault in facts["damaged"]:
        notify(f"damaged, left out: {fault}")
    versions = sum(map(len, facts["versions"].values()))
    counts = f"models: {len(facts['versions'])}, versions: {versions}, uploads: {facts['uploads']}"
    shown = f"{folder} has a copy ({counts}); `halfeven serve --store {folder}` serves it"
    return facts, shown, 1 if facts["damaged"] else 0
