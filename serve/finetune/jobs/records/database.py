"""One SQLite connection that several threads share: its schema, its transactions, its JSON columns.

``synchronous=FULL``: what was committed is on the disk.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson

from .....models.errors import DamagedFile, DiskFull, StoreError
from .....models.files.durable import free_there, no_space_left

DATABASE = "halfeven.db"  # in the store
SCHEMA_VERSION = 6
# Schema 4, that of release 0.1.0. Each object belongs to the key that made it: those of two keys never meet.
_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL, filename TEXT NOT NULL,
    created_at INTEGER NOT NULL, purpose TEXT NOT NULL, deleted INTEGER NOT NULL DEFAULT 0, expires_at INTEGER,
    owner TEXT NOT NULL DEFAULT '');
CREATE UNIQUE INDEX same_file_once ON files (owner, sha256, filename) WHERE NOT deleted;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, revision INTEGER NOT NULL DEFAULT 1,
    created_at INTEGER NOT NULL, status TEXT NOT NULL, model TEXT NOT NULL, name TEXT NOT NULL,
    parent_version INTEGER NOT NULL, training_file TEXT NOT NULL REFERENCES files (id),
    validation_file TEXT REFERENCES files (id), suffix TEXT, seed INTEGER NOT NULL,
    hyperparameters TEXT NOT NULL, metadata TEXT, stage TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0, started_at INTEGER, finished_at INTEGER,
    estimated_finish INTEGER, code TEXT, message TEXT, param TEXT, fine_tuned_model TEXT, version INTEGER,
    progress TEXT NOT NULL DEFAULT '{}', summary TEXT, gate TEXT,
    pause_requested INTEGER NOT NULL DEFAULT 0, owner TEXT NOT NULL DEFAULT '');
CREATE INDEX jobs_by_status ON jobs (status, number);
CREATE TABLE idempotency_keys (
    owner TEXT NOT NULL, key TEXT NOT NULL, job TEXT NOT NULL REFERENCES jobs (id), asked TEXT NOT NULL,
    PRIMARY KEY (owner, key));
CREATE TABLE events (
    job TEXT NOT NULL REFERENCES jobs (id), number INTEGER NOT NULL, created_at INTEGER NOT NULL,
    level TEXT NOT NULL, message TEXT NOT NULL, kind TEXT NOT NULL, data TEXT, PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE TABLE steps (
    job TEXT NOT NULL REFERENCES jobs (id), step INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (job, step)
) WITHOUT ROWID;
CREATE TABLE evaluations (
    job TEXT NOT NULL REFERENCES jobs (id), step INTEGER NOT NULL, created_at INTEGER NOT NULL,
    record TEXT NOT NULL, PRIMARY KEY (job, step)
) WITHOUT ROWID;
"""
# Each upload is a file of its own, whoever has the same content under the same name. Many jobs are kept: each owner's
# are found without those of the others, and those of a file or a key without all.
_SINCE_4 = """
DROP INDEX same_file_once;
CREATE INDEX files_by_content ON files (sha256);
CREATE INDEX jobs_by_owner ON jobs (owner, number, status, id);
CREATE INDEX jobs_by_training_file ON jobs (training_file);
CREATE INDEX jobs_by_validation_file ON jobs (validation_file);
CREATE INDEX idempotency_keys_by_job ON idempotency_keys (job);
"""
_JSON = ("hyperparameters", "metadata", "progress", "summary", "gate", "data", "record")


class Database:
    """Every method may be called from any thread.

    Raises StoreError where the disk fails or another release wrote the file, DamagedFile where it is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # of a pipe SQLite would wait for bytes
            raise DamagedFile(f"{path} is no file: move it away to begin anew")
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._open()
            self._place = self._found()
        except sqlite3.DatabaseError as error:
            raise DamagedFile(
                f"{path} cannot be opened as the job store ({error}); restore it, or move it away to begin anew"
            ) from error

    def _open(self) -> None:
        self._db.row_factory = sqlite3.Row
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "busy_timeout = 5000",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found in (0, 4):
            missing = _SINCE_4 if found else _SCHEMA + _SINCE_4
            self._db.executescript(f"BEGIN;{missing}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
        elif found != SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} has schema {found}, expected {SCHEMA_VERSION}: another release of halfeven wrote "
                "it; use that one, or another --store"
            )

    def _found(self) -> tuple[int, int] | None:
        """The device and the number of the file that the path leads to; None where there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _check_place(self) -> None:
        """Raises StoreError where the file was removed or replaced: what is written into it would be lost."""
        if self._found() != self._place:
            raise StoreError(
                f"{self._path} is not the file any more that this server opened: it was removed or replaced, and "
                "nothing can be kept; restart the server on the store that is meant"
            )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all or nothing, and on the disk when left; inside another one, a part of it."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            self._check_place()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if no_space_left(error):
                    raise DiskFull(
                        f"{self._path} cannot be written: disk full ({free_there(self._path)}); delete files or "
                        "versions there, or give the store more room"
                    ) from error
                raise StoreError(f"{self._path} cannot be written ({error})") from error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    # ``rest`` is this package's own SQL; callers' values are bound, never written into it.

    def all(self, columns: str, table: str, rest: str, *values: Any) -> list[sqlite3.Row]:
        """Raises DamagedFile where the file was damaged since it was opened."""
        try:
            with self._lock:
                return self._db.execute(f"SELECT {columns} FROM {table} WHERE {rest}", values).fetchall()
        except sqlite3.DatabaseError as error:
            raise DamagedFile(f"{self._path} cannot be read ({error}); restore it from a copy") from error

    def one(self, columns: str, table: str, rest: str, *values: Any) -> dict[str, Any] | None:
        rows = self.all(columns, table, f"{rest} LIMIT 1", *values)
        return dict(rows[0]) if rows else None


def copy_database(source: Path, target: Path) -> None:
    """Copy the file as it is between two transactions, whatever process writes to it meanwhile (SQLite's backup).

    Raises DamagedFile where it cannot be read.
    """
    try:
        with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
            read.backup(written)
    except sqlite3.DatabaseError as error:
        raise DamagedFile(f"{source} cannot be copied ({error}); restore it, or move it away") from error


def encoded(row: Mapping[str, Any]) -> list[Any]:
    """JSON columns as text; a NaN becomes null."""
    return [
        orjson.dumps(value).decode() if name in _JSON and value is not None else value
        for name, value in row.items()
    ]


def decoded(row: Mapping[str, Any] | sqlite3.Row) -> dict[str, Any]:
    """Raises DamagedFile where a JSON column holds no JSON."""
    try:
        return {
            name: orjson.loads(value) if name in _JSON and value is not None else value
            for name, value in dict(row).items()
        }
    except ValueError as error:
        raise DamagedFile(
            f"the job store holds a value that is damaged ({error}); restore it from a copy"
        ) from error
