"""Versions on disk: written once, never changed. *Open a draft, put the files in, publish.*

    <store>/models/<name>/<version>/    manifest.json spec.json samples.safetensors weights.safetensors …
    <store>/models/<name>/live          the number of the active version: a file, moved by atomic rename
    <store>/models/<name>/promotions.json   which versions were active, and by whose order (`promotions.py`)

A draft is a hidden folder beside the versions; publishing fsyncs it and renames it to the next free number.
"""

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import BadInput, Conflict, DamagedFile, StoreUnusable, UnknownName
from ..files.durable import fsync, remove_dead_files, remove_dead_folders, replace_text, temporary_folder
from ..files.opened_file import OpenedFile, opened_named
from ..files.stored_json import Opener, json_of, stored_bytes
from ..folder.model_name import NAME
from .manifest import LIVE as LIVE
from .manifest import REFUSED as REFUSED
from .manifest import digest_of, in_present_words, name_in, read_manifest, restored, write_manifest
from .promotions import Promotions, alias_lock, read_promotions, record_promotion
from .reserve import with_reserve

if TYPE_CHECKING:
    from ..spec.spec import ModelSpec

T = TypeVar("T")
_NUMBER = re.compile(r"^[1-9][0-9]{0,17}$")
# The origin of the order by which a version becomes active; FOR_DEVICE: one that was planned again for a device.
OPERATOR, ROLLBACK, FOR_DEVICE = "operator", "rollback", "device"


@dataclass(frozen=True, slots=True)
class Version:
    """One published version. ``status`` is ``live`` (may be active) or ``refused`` (kept as evidence). ``opener``: how
    its files are opened, in a store never through a symbolic link."""

    name: str
    number: int
    folder: Path
    manifest: Mapping[str, Any]
    opener: Opener = OpenedFile

    @property
    def status(self) -> str:
        return self.manifest["status"]

    @property
    def digest(self) -> str:
        """The version's name for machines: the SHA-256 over its files' digests."""
        return self.manifest["digest"]

    @property
    def awaits_promotion(self) -> bool:
        """True if publishing did not make the version active; a later promotion is in `Store.promotions`."""
        return bool(self.manifest.get("awaits_promotion"))

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"

    def has(self, file: str) -> bool:
        return name_in(self.manifest["files"], file) in self.manifest["files"]

    def path(self, file: str) -> Path:
        """The path of one file, which may be missing or damaged."""
        return self.folder / name_in(self.manifest["files"], file)

    def sha256(self, file: str) -> str:
        """The SHA-256 that the manifest says of one file. Raises DamagedFile where it names no such file."""
        name = name_in(self.manifest["files"], file)
        if name not in self.manifest["files"]:
            raise DamagedFile(f"{self} has no file '{file}': it holds {sorted(self.manifest['files'])}")
        return self.manifest["files"][name]

    def sha256_of_form(self, file: str) -> str:
        """The SHA-256 of a form's file. An ONNX file of 2 GB and more has its weights in a second file: then a digest
        over both. Raises DamagedFile as `sha256`."""
        beside = f"{file}.data"
        both = {file: self.sha256(file), **({beside: self.sha256(beside)} if self.has(beside) else {})}
        return digest_of(both) if len(both) > 1 else both[file]

    def file(self, file: str) -> Path:
        """The path of one file, after its bytes were checked against the manifest: for readers that need a path, for a
        file that is replaced after the check is read unchecked. Raises DamagedFile as `opened`."""
        with self.opened(file) as opened:
            return opened.path

    def opened(self, file: str) -> OpenedFile:
        """One file, open, after its bytes were checked against the manifest: load it from the open file. Raises
        DamagedFile naming the file where it is missing, was changed, or is a symbolic link in a store."""
        path, expected = self.path(file), self.sha256(file)
        try:
            opened = self.opener(path, None)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise DamagedFile(f"{path} cannot be read ({reason}); {restored(error)}") from error
        try:
            self._hold_against_manifest(opened, expected)
        except BaseException:
            opened.close()
            raise
        return opened

    def _hold_against_manifest(self, opened: OpenedFile, expected: str) -> None:
        try:
            found = opened.sha256()
        except OSError as error:
            raise DamagedFile(
                f"{opened.path} cannot be read ({error.strerror}); {restored(error)}"
            ) from error
        if found != expected:
            said = f"its SHA-256 is {found[:16]}…, the manifest says {expected[:16]}…"
            raise DamagedFile(f"{opened.path} is damaged: {said}; {restored()}")

    def bytes(self, file: str) -> bytes:
        """All bytes of one small file, after they were checked against the manifest."""
        with self.opened(file) as opened:
            return opened.read()

    def json(self, file: str) -> Any:
        """One JSON file of this version, after its bytes were checked against the manifest."""
        try:
            return in_present_words(json_of(self.bytes(file)))
        except ValueError as error:
            raise DamagedFile(f"{self.folder / file} is not JSON: {error}") from error

    def spec(self) -> "ModelSpec":
        """The version's spec under the name of its folder, which may have been copied or renamed since the
        conversion."""
        from ..spec.spec import ModelSpec  # brings numpy, which the commands that list versions do not need

        return replace(self.read("spec.json", ModelSpec.from_json), name=self.name)

    def read(self, file: str, found: Callable[[Any], T]) -> T:
        """The result of ``found`` for one JSON file. Raises DamagedFile also where a conversion writes no such file."""
        try:
            return found(self.json(file))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, BadInput) as error:
            said = f"has not what a conversion writes ({type(error).__name__}: {str(error)[:200]})"
            raise DamagedFile(f"{self.folder / file} {said}; {restored()}") from error

    @classmethod
    def at(cls, folder: Path) -> "Version":
        """The version in a folder outside of a store (`exporters/exported`); links are followed. Raises DamagedFile."""
        manifest = read_manifest(folder / "manifest.json", opened_named)
        number = found if isinstance(found := manifest.get("version"), int) else 0
        return cls(str(manifest.get("model")), number, folder, manifest, opened_named)


class Store:
    """The folder of all versions. Reading never writes; many processes may publish at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models = root / "models"

    def check(self, writes: str = "") -> None:
        """Raises StoreUnusable where the folder cannot be listed or, with ``writes`` (what is to be kept there), not be
        written into. Nothing is left behind, and a store that is not there yet is not made."""
        try:
            for folder in (self.root, self._models):
                if folder.is_dir():
                    os.scandir(folder).close()
                elif folder.exists() or folder.is_symlink():
                    raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))
                if writes:
                    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
                    tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            needed = f", and {writes} is to be kept there" if writes else ""
            raise StoreUnusable(
                f"the store {self.root} cannot be used: {error.strerror}{needed}; give --store (or "
                f"HALFEVEN_STORE) a folder that this user may {'read and write' if writes else 'read'}"
            ) from error

    def names(self) -> list[str]:
        """Every model that has at least one version, or whose folder cannot be listed, in order."""
        if not self._models.is_dir():
            return []
        return sorted(p.name for p in self._models.iterdir() if self._is_there(p.name))

    def _is_there(self, name: str) -> bool:
        with suppress(DamagedFile):
            return bool(self.numbers(name))
        return True  # one folder that cannot be listed hides no other model

    def numbers(self, name: str) -> list[int]:
        """The version numbers of a model, rising; empty where there is no such model, also for what is no name. Raises
        DamagedFile where its folder cannot be listed."""
        if NAME.fullmatch(name) is None or not (folder := self._folder(name)).is_dir():
            return []
        try:
            return sorted(int(p.name) for p in folder.iterdir() if _NUMBER.fullmatch(p.name) and p.is_dir())
        except FileNotFoundError:  # it was deleted meanwhile
            return []
        except OSError as error:
            raise DamagedFile(f"{folder} cannot be listed ({error.strerror}); {restored(error)}") from error

    def known(self, name: str) -> list[int]:
        """`numbers` of a model that has some. Raises UnknownName, whose message has the store and its models."""
        if numbers := self.numbers(name):
            return numbers
        raise UnknownName.of_model(name, self.names(), f"no model '{{}}' in the store {self.root.absolute()}")

    def version(self, name: str, number: int) -> Version:
        """Raises UnknownName where there is none, DamagedFile where its manifest cannot be read."""
        folder = self._folder(name) / str(number)
        if not folder.is_dir():
            raise UnknownName(f"'{name}' has no version {number}: it has {self.numbers(name)}")
        return Version(name, number, folder, read_manifest(folder / "manifest.json"))

    def numbered(self, name: str, number: str) -> Version:
        """The version whose number a caller wrote. Raises UnknownName, whose message lists the models or versions that
        there are, and DamagedFile."""
        numbers = self.known(name)
        if not _NUMBER.fullmatch(number):
            raise UnknownName(f"'{name}' has no version {number[:40]!r}: it has {numbers}")
        return self.version(name, int(number))

    def live_number(self, name: str) -> int | None:
        """The number in the alias file, or None where nothing is active. Cheap: asked every second."""
        path = self._folder(name) / "live"
        try:
            text = stored_bytes(path).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedFile(
                f"{path} cannot be read ({error.strerror}); it must hold one version number"
            ) from error
        if not _NUMBER.fullmatch(text):
            raise DamagedFile(f"{path} must hold one version number, it holds {text[:80]!r}")
        return int(text)

    def live(self, name: str) -> Version | None:
        number = self.live_number(name)
        return None if number is None else self.named_by_alias(name, number)

    def named_by_alias(self, name: str, number: int) -> Version:
        """The version of ``number``, which was read from the alias file. Raises DamagedFile naming that file where
        there is none."""
        try:
            return self.version(name, number)
        except UnknownName as error:
            raise DamagedFile(
                f"{self._folder(name) / 'live'} names version {number}, and the model has {self.numbers(name)}; "
                "where the folder is still being copied, wait; else write one of these numbers into it"
            ) from error

    def newest(self, name: str) -> Version | None:
        numbers = self.numbers(name)
        return self.version(name, numbers[-1]) if numbers else None

    def promote(self, version: Version, by: str = OPERATOR) -> None:
        """Make this version the active one. Durable when this returns. Raises Conflict for a refused version."""
        with alias_lock(self._folder(version.name)):
            self._promote(version, by)

    def promote_over(self, current: int | None, version: Version, by: str) -> None:
        """Promote only where ``current`` (None: nothing) is still active: compared and moved in one step. Raises
        Conflict where another version was made active since, or for a refused one."""
        with alias_lock(self._folder(version.name)):
            if (found := self.live_number(version.name)) != current:
                raise Conflict(
                    f"{version} was to take the place of version {current}, but version {found} is active"
                )
            self._promote(version, by)

    def promote_published(self, version: Version, by: str) -> bool:
        """Promote a version that was just published, unless one that was published later is active by now: whether it
        was promoted. Raises Conflict for a refused version."""
        with alias_lock(self._folder(version.name)):
            if (self.live_number(version.name) or 0) > version.number:
                return False
            self._promote(version, by)
            return True

    def rollback(self, name: str) -> Version:
        """Make the newest older version that may serve the active one, and return it.

        A version that waits for its promotion is passed over. Raises UnknownName for an unknown model, Conflict where
        no older version may become active.
        """
        self.known(name)
        return with_reserve(self.root, lambda: self._rollback(name))

    def _rollback(self, name: str) -> Version:
        with alias_lock(self._folder(name)):
            current, promoted = self.live_number(name), self.promotions(name)
            for number in reversed(self.numbers(name)):
                if current is not None and number >= current:
                    continue
                try:
                    version = self.version(name, number)
                except DamagedFile:
                    continue  # older versions may not be damaged
                if version.status == LIVE and (number in promoted or not version.awaits_promotion):
                    self._promote(version, ROLLBACK)
                    return version
        raise Conflict(
            f"'{name}' has no version before {current} that may become active: it has {self.numbers(name)}; refused "
            f"or held ones do not count; `halfeven promote {name}@NUMBER` activates another one"
        )

    def promotions(self, name: str) -> Promotions:
        """The first and the last promotion of every version, in place of which version and by whose order."""
        return read_promotions(self._folder(name))

    def _promote(self, version: Version, by: str) -> None:
        if version.status != LIVE:
            raise Conflict(
                f"{version} was refused by the parity gate and is never made active: {version.manifest.get('reason')}"
            )
        folder = self._folder(version.name)
        record_promotion(folder, version.number, self.live_number(version.name), by)
        replace_text(folder / "live", f"{version.number}\n")

    @contextmanager
    def draft(self, name: str) -> Iterator["Draft"]:
        """A folder to fill. It vanishes when the block ends, unless it was published; where this process is killed, the
        next draft or server deletes it (`remove_dead_drafts`)."""
        self.remove_dead_drafts()
        folder = self._folder(name)
        try:
            with temporary_folder(folder, ".draft-") as path:
                yield Draft(self, name, path)
        finally:
            with suppress(OSError):  # a folder that holds something stays
                folder.rmdir()

    def remove_dead_drafts(self) -> None:
        """Delete the drafts and half-written files of processes that were killed: their locks are gone."""
        for folder in (self.root, *self._models.glob("*"), *self._models.glob("*/[a-z]*")):
            remove_dead_files(folder)
        remove_dead_folders(self._models.glob("*/.draft-*"))

    def _folder(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise BadInput(f"'{name}' is not a model name: expected {NAME.pattern}")
        return self._models / name


class Draft:
    """A version in the making: write files under ``folder``, then ``publish`` once."""

    def __init__(self, store: Store, name: str, folder: Path) -> None:
        self._store, self._name, self.folder = store, name, folder

    def write_json(self, file: str, data: Any) -> None:
        (self.folder / file).write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")

    def publish(self, status: str, facts: Mapping[str, Any], twins_after: int | None = None) -> Version:
        """Write the manifest (``facts`` beside the file digests), fsync everything, take the next number.

        ``twins_after``: where another process has published the same ``fingerprint`` under a number behind this one
        meanwhile, that version is given, and this draft vanishes. A version is not active before `Store.promote`.
        """
        write_manifest(self.folder, status, facts)
        if twins_after is None:
            return self._publish()
        with alias_lock(self.folder.parent):
            return self._twin(facts["fingerprint"], twins_after) or self._publish()

    def _twin(self, fingerprint: str, after: int) -> Version | None:
        for number in self._store.numbers(self._name):
            if number > after:
                with suppress(DamagedFile):
                    version = self._store.version(self._name, number)
                    if version.manifest.get("fingerprint") == fingerprint:
                        return version
        return None

    def _publish(self) -> Version:
        number = max(self._store.numbers(self._name), default=0)
        while True:
            number += 1
            target = self.folder.parent / str(number)
            try:
                self.folder.rename(target)
            except OSError:  # another process took the number: a non-empty folder is never replaced
                if not target.exists():
                    raise
                continue
            for folder in target.parents[:3]:  # the model's folder and that of all models may be new as well
                fsync(folder)
            return self._store.version(self._name, number)
