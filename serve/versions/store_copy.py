"""A node's copy of a store: what replicas read and measure, so that none of them writes to the store itself.

The store may be a folder that every node sees, or lie in an object store: fsspec reads both. A version is copied once,
checked by the digests of its manifest, and never again; the small files that name versions (the alias ``live``, the
canary and the shadow, notes of drift, keys) are followed. The alias is moved last, and only to a version that is here.

    <folder>/models/<name>/…    as in `models/store/store.py`
    <folder>/.copying           held by the process that copies: the replicas of a node share the folder
"""

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ...models.errors import BadSetting, DamagedFile, HalfevenError, StoreUnusable
from ...models.files.durable import READABLE, fsync, locked, may_not_be_written, replace_text
from ...models.files.stored_json import stored_bytes
from ...models.folder.model_name import NAME
from ...models.store.manifest import read_manifest, sha256_of
from ...models.store.store import Store
from ..access.keys import NAME_IN_STORE

logger = logging.getLogger("halfeven.versions")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_ALIAS = "live"
COPYING = ".copying"
_FOLLOWED = re.compile(r"rollout\.json|promotions\.json|events\.jsonl|drifted-[1-9][0-9]{0,17}\.json")
_MOST_BYTES = 16 * 2**20  # of a followed file
Entry = Mapping[str, Any]
T = TypeVar("T")
_OF_A_MODEL = 0  # in place of a version's number: the fault is one of the model's files


class StoreCopy:
    """``source``: a path or a URL of fsspec. Raises BadSetting for a URL that fsspec does not know, StoreUnusable for a
    folder that is not this user's alone. ``only``: a model's name, to copy that one and no keys."""

    def __init__(self, source: str, folder: Path, only: str | None = None) -> None:
        self.source, self._only = source, only
        self.store = Store(folder)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(source)
        except (ValueError, ImportError) as error:
            raise BadSetting(f"store = {source!r}: {error}; expected a folder or a URL of fsspec") from error
        _make_private(folder)
        self._stamps: dict[str, tuple[str, str]] = {}  # of a followed file: in the source, in the copy
        # The source's entry of each version's folder (by name, number) when the two manifests were last compared.
        self._compared: dict[tuple[str, int], str] = {}
        self._missed: set[Path] = set()  # folders of the copy that the last look did not find in the source
        self._faults: dict[
            tuple[str, int], tuple[str, str]
        ] = {}  # (stamp of the version's folder, the fault)
        self._working, self._working_on_keys = threading.Lock(), threading.Lock()

    def faults(self, reaches: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The reasons why versions of the store could not be copied, a sentence each; of models that the reader may
        know of."""
        return [fault for (name, _), (_, fault) in self._faults.items() if reaches(name)]

    def follow(self) -> None:
        """Copy what is new, move what was moved, delete what was deleted. One process of a node at a time.

        A version whose files are not what its manifest says is left out, and `faults` names it. Raises StoreUnusable
        where the source cannot be read, or the copy not be written.
        """
        with self._alone("followed"):
            self._follow()

    def follow_keys(self) -> None:
        """Follow the keys alone, beside whatever is followed or changed. Raises StoreUnusable as `follow`."""
        if self._only is None:
            with self._reporting("followed"):
                self._fs.invalidate_cache()
                self._follow_keys()

    def change(self, name: str, deed: Callable[[], T]) -> T:
        """Follow, let ``deed`` change the copy, and write what it changed for this model back to the source.

        For a source that is no folder; it must have one process that calls this. Raises StoreUnusable, and what
        ``deed`` raises; the copy is then as it was.
        """
        with self._alone("written"):
            self._follow(name)
            before = {path: stored_bytes(path) for path in self._followed(name)}
            try:
                done = deed()
                self._write_back(name)
            except Exception:
                self._undo(name, before)
                raise
            return done

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        with self._reporting(what), self._working, locked(self.store.root / COPYING):
            yield

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Raises StoreUnusable for what the source's library raises: not all of it is an OSError."""
        try:
            yield
        except HalfevenError:
            raise
        except Exception as error:
            raise StoreUnusable(
                f"the store {self.source} cannot be {what}: {error}; what is loaded is served on"
            ) from error

    def _follow(self, needed: str | None = None) -> None:
        """A model that cannot be followed stops no other one, unless it is the one that is ``needed``."""
        self._fs.invalidate_cache()
        if self._only is None:
            self._follow_keys()
        names = [name for name in self._listed("models") if NAME.fullmatch(name)]
        names = [name for name in names if self._only in (None, name)]
        there: set[tuple[str, int]] = set()
        here, missed = self.store.root / "models", set[Path]()
        for name in names:
            try:
                numbers = self._follow_model(name)
                there |= {(name, number) for number in numbers}
                missed |= {
                    here / name / number
                    for number in _folders_in(here / name)
                    if _NUMBER.fullmatch(number) and int(number) not in numbers
                }
                self._faults.pop((name, _OF_A_MODEL), None)
            except Exception as error:
                if name == needed or may_not_be_written(error):  # of the copy: no fault of this model
                    raise
                fault = "", f"{name} cannot be followed: {error}"
                if self._faults.get((name, _OF_A_MODEL)) != fault:
                    logger.warning("%s", fault[1])
                self._faults[name, _OF_A_MODEL] = fault
                there |= {version for version in self._faults if version[0] == name}
        self._faults = {version: fault for version, fault in self._faults.items() if version in there}
        self._compared = {version: entry for version, entry in self._compared.items() if version in there}
        missed |= {here / name for name in set(_folders_in(here)) - set(names)}
        for folder in missed & self._missed:  # a folder that is replaced by renaming is missed by one look
            shutil.rmtree(folder, ignore_errors=True)
        self._missed = missed

    def _write_back(self, name: str) -> None:
        """The alias last, as it is read."""
        entries = self._listed(f"models/{name}")
        for path in self._followed(name):
            target = f"{self._root}/models/{name}/{path.name}"
            if path.name not in entries or self._fs.cat_file(target) != stored_bytes(path):
                self._fs.pipe_file(target, stored_bytes(path))

    def _undo(self, name: str, before: Mapping[Path, bytes]) -> None:
        for path in set(self._followed(name)) - set(before):
            path.unlink(missing_ok=True)
        for path, data in before.items():
            if not path.exists() or stored_bytes(path) != data:
                replace_text(path, data.decode(errors="replace"))

    def _followed(self, name: str) -> list[Path]:
        """The files of a model in the copy that are followed, the alias last."""
        folder = self.store.root / "models" / name
        files = [path for path in sorted(folder.iterdir()) if _FOLLOWED.fullmatch(path.name)]
        return [*files, *(path for path in [folder / _ALIAS] if path.exists())]

    def _follow_keys(self) -> None:
        with self._working_on_keys:
            entry = self._listed("").get(NAME_IN_STORE)
            self._follow_file(NAME_IN_STORE, entry, 0o600)

    def _follow_model(self, name: str) -> list[int]:
        """Copy what has changed of one model. Returns the numbers of its versions in the source."""
        place = f"models/{name}"
        entries = self._listed(place)
        folder = self.store.root / place
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(entry) for entry in entries if _NUMBER.fullmatch(entry)]
        for number in numbers:
            if self._is_here(name, number, str(entries[str(number)])):
                self._faults.pop((name, number), None)  # another process of the node may have copied it
            else:
                self._copy_version(name, number)
        folder.mkdir(exist_ok=True)  # a draft whose copy failed takes an empty folder along
        here = [path.name for path in folder.iterdir() if path.is_file()]
        for file in {*entries, *here}:
            if _FOLLOWED.fullmatch(file):
                self._follow_file(f"{place}/{file}", entries.get(file))
        self._follow_alias(name, entries.get(_ALIAS))
        return numbers

    def _is_here(self, name: str, number: int, entry: str) -> bool:
        """True if the copy has this version with the manifest of the source. A store that was made anew has other
        versions under the same numbers. ``entry``: the source's entry of the version's folder."""
        place = f"models/{name}/{number}"
        here = self.store.root / place / "manifest.json"
        if not here.is_file():
            return False
        if self._compared.get((name, number)) != entry:
            try:
                there = self._fs.cat_file(f"{self._root}/{place}/manifest.json")
            except FileNotFoundError:
                return True  # it is being deleted, or written anew
            if stored_bytes(here) != there:
                return False
            self._compared[name, number] = entry
        return True

    def _copy_version(self, name: str, number: int) -> None:
        place = f"models/{name}/{number}"
        listed = self._listed(place)
        if "manifest.json" not in listed:
            return  # it is still being written
        stamp = str(sorted(map(str, listed.values())))
        if self._faults.get((name, number), ("", ""))[0] == stamp:
            return
        self._faults.pop((name, number), None)
        try:
            with self.store.draft(name) as draft:
                self._fetch(place, draft.folder)
                for path in (*draft.folder.rglob("*"), draft.folder):  # what is copied is never fetched again
                    fsync(path)
                shutil.rmtree(self.store.root / place, ignore_errors=True)
                draft.folder.rename(self.store.root / place)
                fsync(draft.folder.parent)
        except (HalfevenError, FileNotFoundError) as error:
            self._faults[name, number] = (
                stamp,
                f"{name}@{number} cannot be copied from {self.source}: {error}",
            )

    def _fetch(self, place: str, folder: Path) -> None:
        """Raises DamagedFile, FileNotFoundError."""
        self._fs.get_file(f"{self._root}/{place}/manifest.json", str(folder / "manifest.json"))
        for file, expected in read_manifest(folder / "manifest.json")["files"].items():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{self._root}/{place}/{file}", str(target))
            if (found := sha256_of(target)) != expected:
                raise DamagedFile(
                    f"{place}/{file} is damaged: its SHA-256 is {found[:16]}…, the manifest says {expected[:16]}…; "
                    "restore the file or convert the model again"
                )

    def _follow_alias(self, name: str, entry: Entry | None) -> None:
        """Move the alias, where the version that it names is here."""
        place = f"models/{name}/{_ALIAS}"
        if entry is None:
            self._follow_file(place, None)
            return
        if self._stamps.get(place) == (str(entry), _stamp_of(self.store.root / place)):
            return
        text = self._fs.cat_file(f"{self._root}/{place}").decode(errors="replace")
        number = text.strip()
        if not _NUMBER.fullmatch(number) or (self.store.root / f"models/{name}/{number}").is_dir():
            self._keep(place, entry, text, READABLE)

    def _follow_file(self, place: str, entry: Entry | None, mode: int = READABLE) -> None:
        target = self.store.root / place
        if entry is None:
            target.unlink(missing_ok=True)
            self._stamps.pop(place, None)
        elif self._stamps.get(place) != (str(entry), _stamp_of(target)):
            if (entry.get("size") or 0) > _MOST_BYTES:
                raise OSError(f"{place} has {entry['size']} bytes, at most {_MOST_BYTES} are read")
            data = self._fs.cat_file(f"{self._root}/{place}")
            self._keep(place, entry, data.decode(errors="replace"), mode)

    def _keep(self, place: str, entry: Entry, text: str, mode: int) -> None:
        """Write a followed file into the copy, unless it has this text already, and note the stamps of both: another
        process of the node may have written it, and a change that was not written back is undone by it."""
        target = self.store.root / place
        if not target.exists() or stored_bytes(target) != text.encode():
            replace_text(target, text, mode)
        self._stamps[place] = str(entry), _stamp_of(target)

    def _listed(self, place: str) -> dict[str, Entry]:
        """The entries of a folder of the source, by name. Raises OSError, FileNotFoundError where there is none."""
        path = f"{self._root}/{place}".rstrip("/")
        return {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry
            for entry in self._fs.ls(path, detail=True)
            if entry.get("type") != "other"  # a pipe, for which reading would wait without end
        }


def _stamp_of(path: Path) -> str:
    """A text that is another one once the file has been replaced; empty where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ""
    return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"


def _folders_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError("it belongs to another user, or others may write into it")
    except OSError as error:
        raise StoreUnusable(
            f"the copy of the store cannot be kept in {folder}: {error}; give `cache` a folder of this user's own"
        ) from error
