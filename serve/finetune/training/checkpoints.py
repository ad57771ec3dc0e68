"""The checkpoints of one job on the disk, as safetensors and JSON: written whole or not at all, checked when read.

    <folder>/log.jsonl              a line for every step and every evaluation; only ever appended to
    <folder>/step-00000120/         state.safetensors  state.json  best.safetensors  manifest.json

A checkpoint is written beside its place, its manifest last, every file synced, and renamed. The newest one whose files
have the digests of its manifest is the last good one. ``best.safetensors`` holds the weights of the best step so far.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ....models.files.durable import fsync
from ....models.files.tensor_file import save_tensors

FORMAT = 3
KEPT = 2  # the last one, and the one before in case the last is damaged
MOST_BYTES = 8 << 30  # of all checkpoints of a job
CORRUPT, FOREIGN, NO_ROOM = "CORRUPT_CHECKPOINT", "FOREIGN_CHECKPOINT", "NO_ROOM_FOR_CHECKPOINT"
STATE, BEST, NUMBERS, MANIFEST = "state.safetensors", "best.safetensors", "state.json", "manifest.json"
_OPTIONAL = frozenset({BEST})


class Refused(Exception):
    """A checkpoint that is not used; ``code`` is CORRUPT_CHECKPOINT or FOREIGN_CHECKPOINT."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OtherData(Exception):
    """The checkpoint was made by the same job from other rows."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a checkpoint: the job, the digest of its settings and parent, and the digest of its rows."""

    job: str
    settings: str
    data: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state in a checkpoint; ``best`` is empty where no step has been evaluated."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    best: Mapping[str, Tensor]


class Log:
    """The lines of a training. ``digest``, ``bytes``: of all lines so far, as a checkpoint records them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self.bytes = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        with self._path.open("ab") as file:
            file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def fits(self, bytes: int, digest: str) -> bool:
        """True if the first ``bytes`` bytes of the file have this digest."""
        try:
            with self._path.open("rb") as file:
                found = hashlib.sha256()
                left = bytes
                while left and (block := file.read(min(left, 1 << 20))):
                    found.update(block)
                    left -= len(block)
        except OSError:
            return bytes == 0
        return left == 0 and found.hexdigest() == digest

    def cut(self, bytes: int) -> list[dict[str, Any]]:
        """Delete what stands behind the first ``bytes`` bytes; gives the lines that are left."""
        with self._path.open("ab") as file:
            file.truncate(bytes)
        data = self._path.read_bytes()
        self._hash, self.bytes = hashlib.sha256(data), bytes
        return [json.loads(line) for line in data.splitlines()]


class Checkpoints:
    """The folder of a job's checkpoints. ``most_bytes``: of all of them together; while one is written, the one before
    it stays in any case."""

    def __init__(self, folder: Path, identity: Identity, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.identity, self.most_bytes = folder, identity, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self.log = Log(folder / "log.jsonl")

    def write(
        self, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], best: Mapping[str, Tensor]
    ) -> str | None:
        """Durable when this returns. Gives the reason where it cannot be written: the bound, the disk, or a number that
        JSON cannot hold."""
        try:
            text = json.dumps(numbers)  # infinity and NaN too: only `_read` reads it
        except (TypeError, ValueError):
            return f"a checkpoint is safetensors and JSON, and JSON cannot hold {_odd_value(numbers)}"
        size = sum(tensor.nbytes for tensor in (*tensors.values(), *best.values()))
        if size > self.most_bytes:
            return (
                f"a checkpoint has {size:,} bytes, and the checkpoints of a job may have {self.most_bytes:,}"
            )
        place, draft = self.folder / f"step-{step:08}", self.folder / ".draft"
        self._make_room(size, place)
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            save_tensors(draft / STATE, tensors, private=True)
            if best:
                save_tensors(draft / BEST, best, private=True)
            (draft / NUMBERS).write_text(text)
            self._write_manifest(step, draft)
            shutil.rmtree(place, ignore_errors=True)  # one that was refused
            draft.rename(place)
            fsync(self.folder)
            self._hold_bound(size, place)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            return f"a checkpoint of {size:,} bytes could not be written: {error}"
        return None

    def last_good(self) -> tuple[Checkpoint | None, list[Refused]]:
        """The newest checkpoint that is whole and belongs here, and why newer ones were not taken; the log is not cut.

        Raises OtherData where one of this job was made from other rows.
        """
        refused: list[Refused] = []
        for place in reversed(self.places()):
            try:
                return self._read(place), refused
            except Refused as error:
                refused.append(error)
        return None, refused

    def places(self) -> list[Path]:
        """The folders of checkpoints, the oldest first."""
        return sorted(place for place in self.folder.glob("step-*") if place.is_dir())

    def _make_room(self, size: int, place: Path) -> None:
        """Delete older checkpoints, the oldest first, so that with one of ``size`` bytes the bounds hold, but never the
        last of them: the new one may not get onto the disk. Newer ones go first: they were refused when the training
        went on from an older one, or anew."""
        there = [one for one in self.places() if one != place]
        older = [one for one in there if one.name < place.name]
        for refused in there[len(older) :]:
            shutil.rmtree(refused, ignore_errors=True)
        while len(older) > 1 and (len(older) >= KEPT or size + sum(map(_bytes, older)) > self.most_bytes):
            shutil.rmtree(older.pop(0), ignore_errors=True)

    def _hold_bound(self, size: int, place: Path) -> None:
        """Delete the one before ``place``, which is on the disk now, where both are more than the bound."""
        older = [one for one in self.places() if one.name < place.name]
        if size + sum(map(_bytes, older)) > self.most_bytes:
            for one in older:
                shutil.rmtree(one, ignore_errors=True)

    def _write_manifest(self, step: int, draft: Path) -> None:
        if self.log.bytes:
            fsync(self.folder / "log.jsonl")
        files = {}
        for path in sorted(draft.iterdir()):
            fsync(path)
            files[path.name] = _digest(path.read_bytes())
        manifest = {
            "format": FORMAT,
            "step": step,
            "job": self.identity.job,
            "settings": self.identity.settings,
            "data": self.identity.data,
            "log": {"bytes": self.log.bytes, "sha256": self.log.digest},
            "files": files,
        }
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
        fsync(draft / MANIFEST)
        fsync(draft)

    def _read(self, place: Path) -> Checkpoint:
        manifest = self._manifest(place)
        found: dict[str, bytes] = {}
        for name in (STATE, NUMBERS, BEST):
            if name in manifest["files"]:
                try:
                    found[name] = (place / name).read_bytes()
                except OSError as error:
                    raise _corrupt(place, f"{name} cannot be read: {error.strerror}") from error
                if _digest(found[name]) != manifest["files"][name]:
                    raise _corrupt(place, f"{name} does not have the digest that the manifest names")
            elif name not in _OPTIONAL:
                raise _corrupt(place, f"its manifest has no {name}")
        if not self.log.fits(manifest["log"]["bytes"], manifest["log"]["sha256"]):
            raise _corrupt(place, "the log of its steps is not the one that it was written with")
        try:
            best = load(found[BEST]) if BEST in found else {}
            numbers = json.loads(found[NUMBERS]) | {"log_bytes": manifest["log"]["bytes"]}
            return Checkpoint(load(found[STATE]), numbers, best)
        except (SafetensorError, ValueError, TypeError) as error:
            raise _corrupt(place, str(error)) from error

    def _manifest(self, place: Path) -> dict[str, Any]:
        try:
            manifest = json.loads((place / MANIFEST).read_bytes())
            owner = Identity(manifest["job"], manifest["settings"], manifest["data"])
            known = manifest["format"] == FORMAT and {"bytes", "sha256"} <= manifest["log"].keys()
            files = manifest["files"].items()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise _corrupt(place, f"its manifest cannot be read: {error}") from error
        if not known or not files:
            raise _corrupt(place, "its manifest has another format")
        if (owner.job, owner.settings) != (self.identity.job, self.identity.settings):
            raise Refused(
                FOREIGN,
                f"the checkpoint {place.name} belongs to another job, or to this one with other settings",
            )
        if owner.data != self.identity.data:
            raise OtherData(
                f"the checkpoint {place.name} was made from rows with the digest {owner.data[:16]}…, and the rows now "
                f"have {self.identity.data[:16]}…: the training is not gone on with other rows. Give the file as it "
                "was, or create a new job."
            )
        return manifest


def _corrupt(place: Path, why: str) -> Refused:
    return Refused(CORRUPT, f"the checkpoint {place.name} is damaged and not used: {why}")


def _odd_value(value: Any, place: str = "") -> str:
    """The first value that JSON cannot hold, by its place."""
    named = value.items() if isinstance(value, Mapping) else ()
    for key, one in enumerate(value) if isinstance(value, list | tuple) else named:
        try:
            json.dumps(one)
        except (TypeError, ValueError):
            return _odd_value(one, f"{place}.{key}")
    return f"'{place.strip('.')}', which is of the type {type(value).__name__}"


def _bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in place.iterdir())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
