"""The keys of the server: how one is made, what is kept of it, what it allows, and the file of the keys.

A key is ``hek_ID_SECRET``. The identifier is public and finds the record; the secret is 256 random bits. The record has
the SHA-256 of the whole key: a slow password hash protects words that can be guessed, and 256 random bits cannot be.

The file is read by the server and changed by ``halfeven keys``; it has digests of the keys, no key. A change is one
atomic rename under a lock, so a server reads the file before a change or after it, and two changes at once are both
kept.
"""

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ...models.errors import BadInput, Conflict, DamagedFile, StoreUnusable, TooLarge, UnknownName
from ...models.files.durable import locked, replace_text
from ...models.files.json_fields import JsonFields
from ...models.files.opened_file import opened_named
from ...models.folder.model_name import NAME

INFER, TRAIN, MANAGE, METRICS = SCOPES = ("infer", "train", "manage", "metrics")
Owners = tuple[str, ...] | None  # of objects: identifiers of keys; None: every owner
EVERY_MODEL = "*"  # what concerns all models together; no model's name
_PREFIX = "hek"
_NO_DIGEST = "0" * 64  # compared where no record is found, so that both cases take the same time
NAME_IN_STORE = "keys.json"
MOST_KEYS = 10_000
_FORMAT = 1
_MOST_BYTES = 16 * 2**20
_OWNER_ONLY = 0o600

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KeyRecord(JsonFields):
    """The stored facts of a key. A key without ``models`` is for all models.

    ``rate``: requests per second, ``concurrency``: requests at once; None: no limit. ``created_at``: Unix seconds.
    """

    id: str
    name: str
    sha256: str
    scopes: tuple[str, ...]
    models: tuple[str, ...] = ()
    rate: float | None = None
    concurrency: int | None = None
    created_at: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "KeyRecord":
        """Raises TypeError, ValueError, KeyError or BadInput where ``data`` is no record."""
        if not all(isinstance(data.get(field, []), list) for field in ("scopes", "models")):
            raise ValueError("the scopes and the models of a key are lists")
        record = cls(**{**data, "scopes": tuple(data["scopes"]), "models": tuple(data.get("models", ()))})
        texts = (record.id, record.name, record.sha256, *record.scopes, *record.models)
        if not all(isinstance(text, str) for text in texts) or len(record.sha256) != len(_NO_DIGEST):
            raise ValueError("a field that is a text in every key is none here")
        _check(record)
        return record

    def allows(self, scopes: Collection[str], model: str | None = None) -> bool:
        """True if the key has one of ``scopes`` and is for the model; None: no model is concerned."""
        return any(scope in scopes for scope in self.scopes) and self.reaches(model)

    def reaches(self, model: str | None) -> bool:
        return model is None or not self.models or model in self.models

    @property
    def owners(self) -> Owners:
        """Whose files and jobs the key may see: its own, and as a key for all models those that were made without a
        key. The operator's keys, for all models with `manage`, see every one."""
        if self.models:
            return (self.id,)
        return None if MANAGE in self.scopes else (self.id, "")


class Keys:
    """All records, found by a key."""

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        self.by_id = {record.id: record for record in records}

    def find(self, key: str) -> KeyRecord | None:
        """The record of a key, None where there is none. The digests are compared in constant time."""
        record = self.by_id.get(_id_of(key))
        known = _NO_DIGEST if record is None else record.sha256
        return record if hmac.compare_digest(_sha256(key), known) else None


def new_key(
    name: str,
    scopes: Iterable[str],
    models: Iterable[str],
    rate: float | None,
    concurrency: int | None,
    created_at: int,
) -> tuple[str, KeyRecord]:
    """A key, which is kept nowhere, and its record. Raises BadInput naming what does not fit."""
    id = secrets.token_hex(6)
    key = f"{_PREFIX}_{id}_{secrets.token_urlsafe(32)}"
    # Each once, in the order of SCOPES or as they came: a list that is read by people.
    chosen = tuple(dict.fromkeys(scopes))
    record = KeyRecord(
        id, name, _sha256(key), chosen, tuple(dict.fromkeys(models)), rate, concurrency, created_at
    )
    _check(record)
    return key, record


def _check(record: KeyRecord) -> None:
    if not NAME.fullmatch(record.name):
        raise BadInput(
            f"key name {record.name[:128]!r}: expected letters, digits and . _ - after a letter or digit, "
            "at most 128 in all"
        )
    unknown = [scope for scope in record.scopes if scope not in SCOPES]
    if unknown or not record.scopes:
        raise BadInput(f"--scope {', '.join(unknown)[:80] or 'is missing'}: expected {', '.join(SCOPES)}")
    if wrong := [model for model in record.models if not NAME.fullmatch(model)]:
        raise BadInput(f"--model {wrong[0][:128]!r} is no model's name; leave --model away for all models")
    if record.rate is not None and not 0 < record.rate <= 1e6:
        raise BadInput(f"--rate {record.rate}: expected requests per second, above 0 to 1,000,000")
    if record.concurrency is not None and not 1 <= record.concurrency <= 1_000_000:
        raise BadInput(f"--concurrency {record.concurrency}: expected requests at once, 1 to 1,000,000")


def _id_of(key: str) -> str:
    parts = key.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else ""


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


class KeyFile:
    """One file of keys, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> Stamp | None:
        """The facts of the file that differ once it is another file; None where there is no file. Raises OSError."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def read(self) -> Keys | None:
        """The keys; None where there is no file. Raises StoreUnusable, DamagedFile."""
        try:
            opened = opened_named(self.path)  # secrets are often mounted as links
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnusable(
                f"the key file {self.path} cannot be opened: {getattr(error, 'strerror', error)}; it must be a file "
                "that the user who runs the server can read"
            ) from error
        with opened:
            found = os.fstat(opened.handle.fileno())
            if found.st_mode & stat.S_IWOTH:
                raise DamagedFile(
                    f"every user may write the key file {self.path}: check it, then chmod o-w {self.path}"
                )
            if found.st_size > _MOST_BYTES:
                raise DamagedFile(
                    f"the key file {self.path} has {found.st_size} bytes, at most {_MOST_BYTES} are read"
                )
            return Keys(self._records(opened.read()))

    def add(
        self,
        name: str,
        scopes: Iterable[str],
        models: Iterable[str] = (),
        rate: float | None = None,
        concurrency: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> tuple[str, KeyRecord]:
        """Make a key and keep its record: (the key, the record). Raises BadInput, Conflict for a name that is taken.

        The first key closes every running server that looks at this file.
        """
        key, record = new_key(name, scopes, models, rate, concurrency, int(now()))
        with self._changing() as records:
            if any(one.name == name for one in records):
                raise Conflict(f"there is a key '{name}' already; choose another name, or revoke it first")
            if len(records) >= MOST_KEYS:
                raise TooLarge(f"the file has {MOST_KEYS} keys, which is the most; revoke some first")
            records.append(record)
        return key, record

    def revoke(self, name: str) -> KeyRecord:
        """Remove the key with this name or identifier. Raises UnknownName, Conflict where one key has it as its name
        and another one as its identifier."""
        with self._changing() as records:
            found = [record for record in records if name in (record.name, record.id)]
            if not found:
                raise UnknownName(f"there is no key '{name[:128]}'; `halfeven keys list` shows them")
            if len(found) > 1:
                both = " and ".join(f"'{record.name}' (identifier {record.id})" for record in found)
                raise Conflict(f"'{name[:128]}' fits the keys {both}: revoke one by its other word")
            records.remove(found[0])
            return found[0]

    @contextmanager
    def _changing(self) -> Iterator[list[KeyRecord]]:
        """The records, written back when the block ends without an error.

        Where the path is a symbolic link, the file that it points to is changed: a server may read that file by its own
        path.
        """
        with ExitStack() as held:
            try:
                path = self.path.resolve()
                path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(path.parent))
            except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
                words = getattr(error, "strerror", error)
                raise StoreUnusable(f"the folder of {self.path} cannot be opened: {words}") from error
            keys = self.read() or Keys()
            records = list(keys.by_id.values())
            yield records
            data = {"format": _FORMAT, "keys": [record.to_json() for record in records]}
            try:
                replace_text(
                    path, orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n", _OWNER_ONLY
                )
            except OSError as error:
                raise StoreUnusable(
                    f"the key file {self.path} cannot be written: {error.strerror}"
                ) from error

    def _records(self, content: bytes) -> list[KeyRecord]:
        try:
            data = orjson.loads(content)
            if data["format"] != _FORMAT or len(data["keys"]) > MOST_KEYS:
                raise ValueError("another format")
            return [KeyRecord.from_json(item) for item in data["keys"]]
        except (ValueError, TypeError, KeyError, AttributeError, BadInput) as error:
            raise DamagedFile(
                f"the key file {self.path} cannot be read as one: {error}; put a copy back, or remove it and make the "
                "keys again"
            ) from error
