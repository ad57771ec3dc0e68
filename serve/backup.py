"""A copy of a store from which a server can start, taken while another server uses the store.

The job database is copied first. Whatever it names was on the disk before it was written there, so that what is copied
afterwards has it: uploads, then versions, and of each model the alias last. Not copied: job folders, so that a job that
was running begins its training anew, inputs on which a half drifted, and what was measured on this machine.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

from ..models.errors import DamagedFile, StoreUnusable
from ..models.files.durable import fsync, new_folder
from ..models.store.manifest import sha256_of
from ..models.store.store import Store
from .finetune.data.files import UPLOADS, whole_uploads
from .finetune.jobs.records.database import DATABASE, copy_database
from .versions.store_copy import COPYING, StoreCopy

_TRIES = 3  # a version may become active after the versions were copied, before the alias is


def back_up(store: Store, folder: Path, notify: Callable[[str], None]) -> Mapping[str, Any]:
    """Write ``folder``, new or empty, at once: it is whole and on the disk, or not there. Only its user may read it,
    since it has the store's keys.

    Every version and upload is checked by its digest; one that is damaged is left out and in the fact ``damaged``, a
    sentence each. Raises Conflict where the folder is not empty, DamagedFile for the job database, StoreUnusable where
    the store cannot be read.
    """
    if not (store.root / "models").is_dir():
        raise StoreUnusable(
            f"the store {store.root} has no model; give --store (or HALFEVEN_STORE) one to copy"
        )
    with new_folder(folder, private=True) as copy:
        damaged = []
        if (database := store.root / DATABASE).is_file():
            copy_database(database, copy / DATABASE)
        uploads, faults = _copy_uploads(store.root / UPLOADS, copy / UPLOADS)
        damaged += faults
        notify(f"{uploads} uploads are copied")
        damaged += _copy_versions(store, copy)
        for path in [*copy.rglob("*"), copy]:
            fsync(path)
        copied = Store(copy)
        versions = {name: copied.numbers(name) for name in copied.names()}
    return {"folder": str(folder), "versions": versions, "uploads": uploads, "damaged": damaged}


def _copy_uploads(source: Path, target: Path) -> tuple[int, list[str]]:
    """The number of uploads copied, and a sentence on each damaged one. One that is deleted meanwhile is left out."""
    copied, faults = 0, list[str]()
    target.mkdir()
    for path in whole_uploads(source):
        try:
            copyfile(path, target / path.name)
        except FileNotFoundError:
            continue
        if sha256_of(target / path.name) != path.name:
            (target / path.name).unlink()
            faults.append(f"{path} is damaged: its SHA-256 is not its name")
            continue
        copied += 1
    return copied, faults


def _copy_versions(store: Store, folder: Path) -> list[str]:
    """Copy versions and aliases. Gives the reasons why some of them could not be copied, a sentence each."""
    copy = StoreCopy(str(store.root.resolve()), folder)
    for _ in range(_TRIES):
        copy.follow()
        if all(_has_alias(store, copy.store, name) for name in store.names()):
            break
    (folder / COPYING).unlink()
    return copy.faults() + [
        f"{name} is copied without an active version: the one that its alias names cannot be copied"
        for name in copy.store.names()
        if not _has_alias(store, copy.store, name)
    ]


def _has_alias(store: Store, copy: Store, name: str) -> bool:
    try:
        return store.live_number(name) is None or copy.live_number(name) is not None
    except DamagedFile:
        return False
