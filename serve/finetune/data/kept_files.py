"""The uploaded files with their records: added and deleted together, and deleted by themselves when they expire."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from ....models.errors import BadInput
from ....models.files.opened_file import OpenedFile
from ....models.store.reserve import with_reserve
from ...access.keys import Owners
from ..jobs.records.job_store import JobStore
from ..jobs.records.job_types import FileRecord
from .files import Files, QuotaReached, Upload

logger = logging.getLogger("halfeven.finetune")
MOST_FILES = 10_000  # of one owner: as many as one answer lists


class KeptFiles:
    """The uploaded files: their bytes and their records are added and deleted together.

    Every method may be called from any thread, and blocks for the disk. ``now`` gives Unix seconds.
    """

    def __init__(self, job_store: JobStore, files: Files, now: Callable[[], float] = time.time) -> None:
        self._job_store, self.files, self._now = job_store, files, now
        # Held while a content's file and its record are written, so that a delete cannot come between them.
        self._changing = threading.Lock()
        if unknown := files.contents() - {record.sha256 for record in job_store.files()}:
            self._settle(unknown)

    def _settle(self, unknown: set[str]) -> None:
        """Delete the files without a record: an earlier server ended between the two. Without any record the database
        is a new one, and the files are those of the one before."""
        folder, number = self.files.folder, len(unknown)
        if not self._job_store.knows_files():
            logger.warning(
                "the job database knows no file, but %s has files: %d. They stay, and nobody can use them. If another "
                "database was moved away or lost, stop the server and bring it back before a file is uploaded; else "
                "delete them. A start after the first upload deletes them.",
                folder,
                number,
            )
            return
        for one in unknown:
            self.files.remove(one)
        logger.warning("files in %s that the job database does not know were deleted: %d", folder, number)

    def keep(self, upload: Upload, owner: str = "") -> FileRecord:
        """The record of an upload, which belongs to ``owner``.

        Where it cannot be written, the bytes do not stay. Raises StoreError, and QuotaReached where the owner would
        have more than `MOST_FILES`.
        """
        created = int(self._now())
        expires = None if upload.seconds is None else created + upload.seconds
        id = "file-" + secrets.token_hex(12)
        sent = upload.sha256, upload.bytes, upload.filename
        record = FileRecord(id, *sent, created, expires_at=expires, owner=owner)
        with self._changing:
            try:
                self.files.keep(upload)
                self._check_number(owner)
                return self._job_store.add_file(record)
            except BaseException:
                if all(one.sha256 != upload.sha256 for one in self._job_store.files()):
                    self.files.remove(upload.sha256)
                raise

    def _check_number(self, owner: str) -> None:
        if (count := len(self._job_store.files((owner,)))) >= MOST_FILES:
            raise QuotaReached(
                f"{count} files are here of at most {MOST_FILES} of one key, or of all callers without one; "
                "delete some (DELETE /v1/files/ID), or upload fewer and larger ones"
            )

    def opened(self, id: str, owners: Owners = None) -> tuple[FileRecord, OpenedFile]:
        """A file's record, and its bytes: a delete from now on takes neither. Raises UnknownName, DamagedFile."""
        with self._changing:
            record = self._job_store.file(id, owners)
            return record, self.files.opened(record.sha256)

    def bytes_of(self, owner: str) -> int:
        """Bytes of this owner's files; those of files with the same content once, as on the disk."""
        return sum({record.sha256: record.bytes for record in self._job_store.files((owner,))}.values())

    def delete(self, id: str, owners: Owners = None) -> None:
        """Forget a file; its bytes go with the last name they have. Raises UnknownName, BadInput while it is needed."""
        with self._changing:
            sha256 = self._job_store.file(id, owners).sha256
            forget = partial(self._job_store.delete_file, id, owners)
            if with_reserve(self.files.folder.parent, forget):  # to delete is how room is made
                self.files.remove(sha256)

    def delete_expired(self) -> None:
        for id in self._job_store.expired():
            try:
                self.delete(id)
            except BadInput:  # deleted, or needed by a job, since
                continue
