"""The file of the keys: read by the server, changed by ``halfeven keys``. It has digests of the keys, no key.

A change is one atomic rename under a lock, so a server reads the file before a change or after it, and two changes at
once are both kept.
"""

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson

from ...models.errors import BadInput, Conflict, DamagedFile, StoreUnusable, TooLarge, UnknownName
from ...models.files.durable import locked, replace_text
from ...models.files.opened_file import opened_named
from .keys import KeyRecord, Keys, new_key

NAME_IN_STORE = "keys.json"
MOST_KEYS = 10_000
_FORMAT = 1
_MOST_BYTES = 16 * 2**20
_OWNER_ONLY = 0o600

Stamp = tuple[int, int, int]


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
