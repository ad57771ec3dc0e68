"""The records of uploaded files in SQLite. Each belongs to the key that uploaded it, whoever has the same bytes."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from .....models.errors import BadInput, UnknownName
from ....access.keys import Owners
from .database import Database
from .job_types import FINAL, NEXT, FileRecord

_FILE = ", ".join(field.name for field in fields(FileRecord))
# SQLite uses the index by status for a list of states, and not for NOT IN.
UNFINISHED = f"status IN ({', '.join(repr(status) for status in sorted(NEXT.keys() - FINAL))})"


class FileStore:
    """``now`` gives Unix seconds. ``owners``: whose files are looked at; those of others are unknown."""

    def __init__(self, db: Database, now: Callable[[], float]) -> None:
        self._db, self._now = db, now

    def add_file(self, record: FileRecord) -> FileRecord:
        """Add the record. The same content again, also under the same name, is a file of its own: who uploaded the
        first one may delete it, and each expires when its own upload said."""
        with self._db.transaction() as db:
            values = [getattr(record, field.name) for field in fields(FileRecord)]
            db.execute(f"INSERT INTO files ({_FILE}) VALUES ({', '.join('?' * len(values))})", values)
        return record

    def file(self, id: str, owners: Owners = None) -> FileRecord:
        """Raises UnknownName."""
        row = self._db.one(_FILE, "files", "id = ? AND NOT deleted", id)
        if row is None or not (owners is None or row["owner"] in owners):
            raise UnknownName(f"no file '{id[:80]}'; GET /v1/files lists them, POST /v1/files uploads one")
        return FileRecord(**row)

    def usable_file(self, id: str, owners: Owners = None) -> FileRecord:
        """A file that a new job may name. Raises UnknownName, also where its time is over and only other jobs still
        need it."""
        record = self.file(id, owners)
        if record.expires_at is not None and record.expires_at <= self._now():
            raise UnknownName(f"file '{id[:80]}' has expired; POST /v1/files uploads it again")
        return record

    def files(self, owners: Owners = None) -> list[FileRecord]:
        """All of them, the newest first."""
        where, values = chosen(owners)
        rest = " AND ".join((*where, "NOT deleted")) + " ORDER BY rowid DESC"
        return [FileRecord(**row) for row in self._db.all(_FILE, "files", rest, *values)]

    def knows_files(self) -> bool:
        """False where no file was ever recorded here, or none of them is remembered."""
        return self._db.one("1", "files", "1") is not None

    def expired(self) -> list[str]:
        """The files whose time is over; `delete_file` refuses those that an unfinished job needs."""
        rest = "NOT deleted AND expires_at <= ?"
        return [row["id"] for row in self._db.all("id", "files", rest, int(self._now()))]

    def delete_file(self, id: str, owners: Owners = None) -> bool:
        """Forget a file; True where no other record shares its content, which may then go too.

        Raises UnknownName, BadInput while a job that is not finished needs it.
        """
        with self._db.transaction() as db:
            record = self.file(id, owners)
            needs = f"(training_file = ? OR validation_file = ?) AND {UNFINISHED}"
            if job := self._db.one("id, status, owner", "jobs", needs, id, id):
                named = owners is None or job["owner"] in owners
                by = (
                    f"job {job['id']}, which is {job['status']}"
                    if named
                    else "another key's job that has not ended"
                )
                raise BadInput(f"file '{id}' is needed by {by}; cancel the job first")
            db.execute("UPDATE files SET deleted = 1 WHERE id = ?", [id])
            return self._db.one("id", "files", "sha256 = ? AND NOT deleted", record.sha256) is None


def chosen(owners: Owners) -> tuple[Sequence[str], Sequence[Any]]:
    """The conditions on the column ``owner``, and their values."""
    if owners is None:
        return ["1"], []
    return [f"owner IN ({', '.join('?' * len(owners))})"], owners
