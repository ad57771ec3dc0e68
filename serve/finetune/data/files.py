"""Uploads: streamed to disk while they arrive, named by their content, never whole in memory.

    <store>/files/.upload-…     while it arrives; deleted at start, so that a crash leaves no incomplete file
    <store>/files/<sha256>      the bytes, once, whatever the file name; written once, never changed

The multipart body is read by python-multipart's streaming parser with bounds of our own on every part of it:
Starlette's ``request.form()`` bounds neither a file's size nor the whole body.
"""

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from ....models.errors import BadInput, BadRequest, DamagedFile, DiskFull, StoreError, TooLarge
from ....models.files.durable import free_there, fsync, no_space_left
from ....models.files.opened_file import OpenedFile
from ...http.caller import CallerLeft
from ...http.codecs.multipart import FormReader
from ...http.error_mapping import SlowBody
from ...http.limits.request_limits import DEFAULTS
from ...http.limits.shared_places import may_hold

T = TypeVar("T")
PURPOSE = "fine-tune"
UPLOADS = "files"  # the folder in the store
_FIELDS = ("purpose", "file")
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"  # as OpenAI's clients send them
_LEAST_LIFE, _LONGEST_LIFE = 3600, 2_592_000  # seconds: OpenAI's bounds
_MAX_FIELD = DEFAULTS.form_field_bytes
_MAX_NAME = 255  # characters of a file name
_ENVELOPE = 16_384  # bytes of a body that are not the file: boundaries, headers, the other field
_BLOCK = 1 << 20  # parsed, hashed and written at a time, in a thread
# The bytes of one upload in memory, at most: what has come, the block that is written, the piece that comes
IN_MEMORY = 3 * _BLOCK
_LEAST_BYTES_PER_SECOND = DEFAULTS.answer_bytes_per_second  # on average, after the first silence_s seconds
_DIGEST = re.compile(r"^[0-9a-f]{64}$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class QuotaReached(TooLarge):
    """The uploaded files together would be too large, or too many of one key. Delete some, or raise
    HALFEVEN_MAX_FILES_MIB."""

    code = "files_quota_reached"


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Upload:
    """A whole upload, on the disk under its temporary name until `Files.keep`."""

    sha256: str
    bytes: int
    filename: str
    path: Path
    seconds: int | None = None  # until it expires


class Files:
    """The folder of uploads. ``max_bytes`` bounds one file, ``most_bytes`` all of them together, ``silence_s`` the wait
    for the next bytes."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        silence_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = 1 << 50,
    ) -> None:
        self.folder, self.max_bytes, self.most_bytes = folder, max_bytes, most_bytes
        self.silence_s, self._clock = silence_s, clock
        self._coming = 0  # bytes that callers have declared and not sent yet
        self._arriving: Counter[str] = Counter()  # by owner: bytes, declared or here, of uploads under way
        self.counting = threading.RLock()  # held while bytes turn from declared ones into written ones
        folder.mkdir(parents=True, exist_ok=True)
        for half in folder.glob(".upload-*"):  # folders are tables that were being read
            shutil.rmtree(half) if half.is_dir() else half.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        """Raises DamagedFile as `opened`."""
        with self.opened(sha256) as opened:
            return opened.path

    def opened(self, sha256: str) -> OpenedFile:
        """Raises DamagedFile where the bytes are gone, or what is there is no regular file."""
        path = self.folder / sha256
        if not _DIGEST.fullmatch(sha256):
            raise DamagedFile(f"{sha256[:80]!r} names no upload; upload the file again")
        try:
            return OpenedFile(path)
        except OSError as error:
            raise DamagedFile(
                f"{path} cannot be read ({error.strerror}), though the job store lists it; upload the file again"
            ) from error

    def keep(self, upload: Upload) -> Path:
        """Give an upload its lasting name. Durable when this returns."""
        path = upload.path.replace(self.folder / upload.sha256)
        fsync(self.folder)
        return path

    def contents(self) -> set[str]:
        """The digests of all files here."""
        return {path.name for path in whole_uploads(self.folder)}

    def remove(self, sha256: str) -> None:
        (self.folder / sha256).unlink(missing_ok=True)

    def used(self) -> int:
        """Bytes of all files, those that are arriving included."""
        found = 0
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # deleted meanwhile
                found += path.stat().st_size
        return found

    async def receive(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        receive: Receive,
        keep: Callable[[Upload], T],
        owner: str = "",
        held: Callable[[], int] = lambda: 0,
    ) -> T:
        """Read one ``multipart/form-data`` body with the fields ``purpose`` and ``file``, fsync the file, and hand it
        to ``keep``. ``held``: bytes of the files that the ``owner`` has here, asked whenever the owner is to have more:
        other uploads may end while this one comes. Both are called in threads.

        Raises what ``keep`` raises, BadInput, TooLarge (for a declared length before a byte is read), SlowBody,
        CallerLeft, and QuotaReached, DiskFull and StoreError; nothing is left on the disk then.
        """
        known = {name.lower(): value for name, value in headers}
        boundary = _boundary(known.get(b"content-type", b""))
        declared = known.get(b"content-length", b"0")
        if len(declared) > 18 or (declared.isdigit() and int(declared) > self.max_bytes + _ENVELOPE):
            raise _too_large(declared.decode("latin-1")[:20], self.max_bytes)
        size = max(0, int(declared) - _ENVELOPE) if declared.isdigit() else 0
        coming = _Coming(self, size, owner, held)
        await asyncio.to_thread(coming.reserve)
        try:
            upload = await self._received(coming, boundary, receive)
            return await asyncio.to_thread(coming.ended_by, keep, upload)
        finally:
            # Another upload may hold the counts while it is kept.
            await asyncio.shield(asyncio.to_thread(coming.end))

    async def _received(self, coming: "_Coming", boundary: bytes, receive: Receive) -> Upload:
        handle, name = await asyncio.to_thread(tempfile.mkstemp, prefix=".upload-", dir=self.folder)
        form = _UploadForm(handle, Path(name), boundary, self.max_bytes)
        try:
            await self._stream(form, coming, receive)
            return await asyncio.to_thread(form.finish)
        except OSError as error:
            if no_space_left(error):
                raise DiskFull(
                    "the store's disk is full, so the upload was not kept; delete files or versions there "
                    f"({free_there(self.folder)}), or give the store more room"
                ) from error
            raise StoreError(f"the upload cannot be kept ({error.strerror}); see the store's disk") from error
        except FormParserError as error:
            raise BadRequest(
                f"the body is not the multipart form that its header promises: {error}"
            ) from error
        finally:
            form.close()

    async def _stream(self, form: "_UploadForm", coming: "_Coming", receive: Receive) -> None:
        begun, received = self._clock(), 0
        waiting = bytearray()
        more = True
        while more:
            message = await self._next(receive)
            waiting += message.get("body", b"")
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            if received > self.max_bytes + _ENVELOPE:
                raise _too_large(f"more than {self.max_bytes}", self.max_bytes)
            if self._clock() - begun > self.silence_s + received / _LEAST_BYTES_PER_SECOND:
                raise SlowBody(
                    f"the upload came at under {_LEAST_BYTES_PER_SECOND} bytes a second; send it faster"
                )
            if len(waiting) >= _BLOCK or not more:
                await asyncio.to_thread(coming.write, form, bytes(waiting))
                waiting.clear()

    async def _next(self, receive: Receive) -> MutableMapping[str, Any]:
        try:
            message = await asyncio.wait_for(receive(), self.silence_s)
        except TimeoutError:
            raise SlowBody(f"no byte of the upload came for {self.silence_s:g} s; send it faster") from None
        if message["type"] != "http.request":
            raise CallerLeft
        return message

    def expect(self, change: int, more: int, before: int, owner: str, held: Callable[[], int]) -> None:
        """Change the bytes that are declared and not here yet, because ``more`` bytes of an upload of the ``owner`` are
        declared or here, after the ``before`` ones. Raises QuotaReached where all would be too many, or the owner's;
        then nothing is changed. An upload is held against the bounds as a whole."""
        with self.counting:
            size = self.used() + self._coming + change
            whole, own = (before + more, held() + self._arriving[owner] - before) if more else (0, 0)
            taken = size - whole
            if may_hold(whole, own, taken, self.most_bytes, owner):
                self._coming += change
                if more:
                    self._arriving[owner] += more
                return
            if size <= self.most_bytes:
                raise QuotaReached(
                    f"with this upload the files of this key would have {own + whole} bytes, and a key may have as "
                    f"many as are free for all, now {self.most_bytes - taken}: delete some (DELETE /v1/files/ID), or "
                    "start the server with a larger HALFEVEN_MAX_FILES_MIB"
                )
            raise QuotaReached(
                f"with this upload the files here would have {size} bytes, at most {self.most_bytes} are kept; delete "
                "some (DELETE /v1/files/ID), or start the server with a larger HALFEVEN_MAX_FILES_MIB"
            )

    def expected(self, change: int, more: int, owner: str) -> None:
        """The change of counts that `expect` makes, without a bound."""
        with self.counting:
            self._coming += change
            self._arriving[owner] += more
            self._arriving = +self._arriving  # without the owners that have none


class _Coming:
    """The bytes that one upload has declared: reserved before anything is awaited for them, until they have come."""

    def __init__(self, files: Files, nbytes: int, owner: str, held: Callable[[], int]) -> None:
        self._files, self._nbytes, self._owner, self._held = files, nbytes, owner, held
        self._reserved = self._own = 0  # ``own``: declared or written

    def reserve(self) -> None:
        """Reserve the declared bytes. Raises QuotaReached."""
        self._expect(self._nbytes, self._nbytes)
        self._reserved = self._nbytes

    def write(self, form: "_UploadForm", block: bytes) -> None:
        """Write ``block``; a byte is counted once, as declared or as written. Raises QuotaReached, and as the form."""
        with self._files.counting:
            form.write(block)
            fewer = min(len(block), self._reserved)
            # Bytes that were declared hold their room already: to count all files again would take long.
            self._files.expected(-fewer, 0, self._owner)
            self._reserved -= fewer
            if beyond := len(block) - fewer:
                self._expect(0, beyond)

    def ended_by(self, keep: Callable[[Upload], T], upload: Upload) -> T:
        """The record of the upload that ``keep`` makes. Its bytes are counted here until they count in the record, and
        deleted where there is none."""
        with self._files.counting:
            try:
                kept = keep(upload)
            except BaseException:
                upload.path.unlink(missing_ok=True)
                raise
            self.end()
        return kept

    def end(self) -> None:
        """Free the bytes that were declared and did not come; the bytes that came are in a record, or deleted."""
        if not (self._reserved or self._own):
            return
        self._files.expected(-self._reserved, -self._own, self._owner)
        self._reserved = self._own = 0

    def _expect(self, change: int, more: int) -> None:
        self._files.expect(change, more, self._own, self._owner, self._held)
        self._own += more


def whole_uploads(folder: Path) -> list[Path]:
    """The files of uploads that have arrived whole, in the order of their names; none where ``folder`` is not there."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if _DIGEST.fullmatch(path.name))


class _UploadForm(FormReader):
    """The fields of an upload by their names; the file's bytes go straight to the disk."""

    def __init__(self, handle: int, path: Path, boundary: bytes, max_bytes: int) -> None:
        self._out, self._path, self._max_bytes = os.fdopen(handle, "wb"), path, max_bytes
        self._hash, self._bytes = hashlib.sha256(), 0
        self._fields: dict[str, bytearray] = {}
        self._part, self._filename = "", ""
        self._finished = False
        super().__init__(
            boundary, on_headers_finished=self._on_headers_finished, on_part_data=self._on_part_data
        )

    def write(self, block: bytes) -> None:
        self.parser.write(block)

    def finish(self) -> Upload:
        """The body is complete: check the form, and fsync the file."""
        if not self.ended:
            raise BadRequest("the multipart form breaks off before its last boundary; send it again")
        if missing := [name for name in _FIELDS if name not in self._fields]:
            raise BadInput(f"the form has no field '{missing[0]}': expected purpose={PURPOSE} and one file")
        purpose = self._fields["purpose"].decode(errors="replace").strip()
        if purpose != PURPOSE:
            raise BadInput(f"purpose = {purpose!r}: expected '{PURPOSE}', the only one offered here")
        if self._bytes == 0:
            raise BadInput(f"the file {self._filename!r} is empty; expected a safetensors or npz file")
        seconds = self._seconds()
        self._out.flush()
        os.fsync(self._out.fileno())
        self._finished = True
        return Upload(self._hash.hexdigest(), self._bytes, self._filename, self._path, seconds)

    def _seconds(self) -> int | None:
        """The file's life in seconds, by the fields ``expires_after``; None: until it is deleted. Raises BadInput."""
        anchor, seconds = (self._fields.get(name) for name in (_ANCHOR, _SECONDS))
        if anchor is None and seconds is None:
            return None
        text = (seconds or b"").decode(errors="replace").strip()
        known = text.isascii() and text.isdigit() and len(text) < 10
        if anchor != b"created_at" or not known or not _LEAST_LIFE <= int(text) <= _LONGEST_LIFE:
            raise BadInput(
                f"expires_after: expected anchor 'created_at' and {_LEAST_LIFE} to {_LONGEST_LIFE} seconds, got anchor "
                f"{(anchor or b'').decode(errors='replace')!r} and {text!r} seconds"
            )
        return int(text)

    def close(self) -> None:
        """Called in every case: an incomplete upload is deleted."""
        if not self._finished:
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written is not written now either
            self._out.close()

    def _on_headers_finished(self) -> None:
        self._part, filename = self.field_and_file()
        if self._part not in (*_FIELDS, _ANCHOR, _SECONDS) or self._part in self._fields:
            fault = "a second" if self._part in self._fields else "an unknown"
            raise BadInput(
                f"the form has {fault} field '{self._part[:80]}': expected {' and '.join(_FIELDS)}, once"
            )
        self._fields[self._part] = bytearray()
        if self._part == "file":
            self._filename = _clean(filename)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._take(data[start:end])
            return
        self._fields[self._part] += data[start:end]
        if len(self._fields[self._part]) > _MAX_FIELD:
            raise TooLarge(f"the form's field '{self._part}' has more than {_MAX_FIELD} bytes")

    def _take(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes > self._max_bytes:
            raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
        self._hash.update(piece)
        self._out.write(piece)


def _boundary(content_type: bytes) -> bytes:
    kind, options = parse_options_header(content_type.decode("latin-1"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:  # RFC 2046 §5.1.1
        raise BadRequest(
            "expected a multipart/form-data body with a boundary of 1 to 70 characters and the fields "
            f"{' and '.join(_FIELDS)}, got the content type {content_type[:80].decode('latin-1')!r}"
        )
    return boundary


def _clean(filename: str) -> str:
    """A name to show; never a path to open."""
    return _CONTROL.sub("", filename)[-_MAX_NAME:] or "unnamed"


def _too_large(size: str, limit: int) -> TooLarge:
    return TooLarge(
        f"the upload has {size} bytes, at most {limit} are taken; send fewer rows, or start the server with a "
        "larger HALFEVEN_MAX_UPLOAD_MIB"
    )
