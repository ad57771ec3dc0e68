"""Uploads: bounded while they stream, whole or not there, once on the disk whatever they are called."""

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import (
    BadInput,
    BadRequest,
    DamagedFile,
    DiskFull,
    HalfevenError,
    TooLarge,
)
from halfeven.serve.finetune.data import files as module
from halfeven.serve.finetune.data.files import Files, QuotaReached, Upload
from halfeven.serve.http.caller import CallerLeft
from halfeven.serve.http.error_mapping import SlowBody

TYPE = b"multipart/form-data; boundary=edge"
LIMIT = 200_000


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--edge\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(content: bytes, filename: str = "train.npz", purpose: str = "fine-tune") -> bytes:
    return part("purpose", purpose.encode()) + part("file", content, filename) + b"--edge--\r\n"


def send(
    files: Files,
    pieces: Sequence[bytes],
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", TYPE),),
    then: str = "http.request",
) -> Upload:
    """An upload whose body comes in these pieces; with ``then`` the connection ends otherwise."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
    ]
    messages[-1]["more_body"] = then != "http.request"
    coming = iter([*messages, {"type": then}])

    async def receive() -> dict[str, Any]:
        return next(coming)

    return asyncio.run(files.receive(headers, receive, lambda upload: upload))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "files", LIMIT)


def left(files: Files) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir())


@pytest.fixture
def content() -> bytes:
    """Bytes that hold what a boundary begins with."""
    random = np.random.default_rng()
    return random.bytes(70_000) + b"\r\n--edg\r\n--\r--edge" + random.bytes(70_000) + b"\r\n--ed"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 4096, 10**6])
def test_the_bytes_come_through_however_the_body_is_cut(files: Files, content: bytes, size: int) -> None:
    content = content if size > 1 else content[69_990:70_030]
    body = form(content)
    upload = send(files, [body[i : i + size] for i in range(0, len(body), size)])
    assert (upload.sha256, upload.bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    assert left(files) == [upload.path.name] and upload.path.name.startswith(".upload-")
    assert files.keep(upload).read_bytes() == content
    assert left(files) == [upload.sha256] and files.path(upload.sha256).read_bytes() == content


def test_the_parser_is_fed_in_blocks_so_that_a_long_body_is_never_whole_in_memory(
    files: Files, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 8192)
    written: list[int] = []
    write = module._UploadForm.write
    monkeypatch.setattr(
        module._UploadForm, "write", lambda self, block: (written.append(len(block)), write(self, block))[1]
    )
    body = form(content)
    upload = send(files, [body[i : i + 1000] for i in range(0, len(body), 1000)])
    assert upload.bytes == len(content)
    assert len(written) > 10 and max(written) < 8192 + 1000


def test_the_fields_may_come_in_any_order_and_the_name_is_only_a_name(files: Files) -> None:
    body = part("file", b"data", "../../räksmörgås\x01.npz") + part("purpose", b"fine-tune") + b"--edge--"
    upload = send(files, [body])
    assert upload.filename == "../../räksmörgås.npz"
    assert files.keep(upload).parent == files.folder


def test_the_same_content_twice_is_stored_once(files: Files, content: bytes) -> None:
    for name in ("a.npz", "b.npz"):
        files.keep(send(files, [form(content, name)]))
    assert left(files) == [hashlib.sha256(content).hexdigest()]
    files.remove(left(files)[0])
    with pytest.raises(DamagedFile, match="upload the file again"):
        files.path(hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-type", TYPE), (b"content-length", str(LIMIT * 3).encode())],
        [(b"content-type", TYPE), (b"content-length", b"9" * 30)],
    ],
)
def test_a_declared_length_beyond_the_limit_is_refused_before_a_byte_is_read(
    files: Files, headers: list[tuple[bytes, bytes]]
) -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing must be read")

    with pytest.raises(TooLarge, match=f"at most {LIMIT} are taken"):
        asyncio.run(files.receive(headers, receive, files.keep))
    assert left(files) == []


def test_an_undeclared_body_is_cut_off_at_the_limit_and_leaves_nothing(files: Files) -> None:
    read: list[int] = []

    async def endless() -> dict[str, Any]:
        read.append(50_000)
        body = form(b"")[: -len(b"\r\n--edge--\r\n")] if len(read) == 1 else b"x" * 50_000
        return {"type": "http.request", "body": body, "more_body": True}

    with pytest.raises(TooLarge, match=f"at most {LIMIT} are taken"):
        asyncio.run(files.receive([(b"content-type", TYPE)], endless, files.keep))
    assert sum(read) < 2 * LIMIT
    assert left(files) == []


def test_a_file_one_byte_over_the_limit_is_too_large_and_one_of_the_limit_is_not(files: Files) -> None:
    assert send(files, [form(b"x" * LIMIT)]).bytes == LIMIT
    with pytest.raises(TooLarge):
        send(files, [form(b"x" * (LIMIT + 1))])


MANY_HEADERS = b"".join(b"X-%d: 1\r\n" % n for n in range(50))
DISPOSITION = b'Content-Disposition: form-data; name="file"; filename="a"'
BAD: dict[str, tuple[bytes, type[HalfevenError], str]] = {
    "another purpose": (
        form(b"x", purpose="assistants"),
        BadInput,
        "purpose = 'assistants': expected 'fine-tune'",
    ),
    "no purpose": (part("file", b"x", "a") + b"--edge--", BadInput, "no field 'purpose'"),
    "no file": (part("purpose", b"fine-tune") + b"--edge--", BadInput, "no field 'file'"),
    "an empty file": (form(b""), BadInput, "is empty"),
    "two files": (part("file", b"x", "a") * 2 + b"--edge--", BadInput, "second field 'file'"),
    "an unknown field": (part("expires_after", b"x") + form(b"x"), BadInput, "unknown field 'expires_after'"),
    "a field without a name": (b"--edge\r\nX: y\r\n\r\nz\r\n--edge--", BadInput, "unknown field ''"),
    "a long field": (part("purpose", b"f" * 999), TooLarge, "more than 256 bytes"),
    "many headers": (b"--edge\r\n" + MANY_HEADERS + b"\r\nx", BadRequest, "header count"),
    "a long header": (b"--edge\r\n" + DISPOSITION + b"a" * 9999 + b"\r\n\r\nx", BadRequest, "header size"),
    "another boundary": (form(b"x").replace(b"--edge", b"--other"), BadRequest, "not the multipart form"),
    "an end in the middle": (form(b"x" * 99)[:-40], BadRequest, "breaks off"),
    "nothing": (b"", BadRequest, "breaks off"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_form_that_is_not_ours_is_refused_and_leaves_nothing(files: Files, case: str) -> None:
    body, kind, words = BAD[case]
    for pieces in ([body], [body[i : i + 1] for i in range(len(body))] or [b""]):
        with pytest.raises(kind, match=words):
            send(files, pieces)
        assert left(files) == []


@pytest.mark.parametrize(
    "content_type",
    [b"", b"application/json", b"multipart/form-data", TYPE + b"x" * 100, b"multipart/mixed; boundary=edge"],
)
def test_a_body_that_is_no_form_is_refused_by_its_type(files: Files, content_type: bytes) -> None:
    with pytest.raises(BadRequest, match="expected a multipart/form-data body"):
        send(files, [form(b"x")], [(b"content-type", content_type)])
    assert left(files) == []


def test_a_caller_who_leaves_in_the_middle_leaves_nothing(files: Files, content: bytes) -> None:
    with pytest.raises(CallerLeft):
        send(files, [form(content)[:100_000]], then="http.disconnect")
    assert left(files) == []


def test_a_caller_who_falls_silent_is_not_waited_for(tmp_path: Path) -> None:
    files = Files(tmp_path, LIMIT, silence_s=0.05)

    async def silent() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(SlowBody, match=r"no byte of the upload came for 0\.05 s"):
        asyncio.run(files.receive([(b"content-type", TYPE)], silent, files.keep))
    assert left(files) == []


def test_a_caller_who_drips_is_not_waited_for(tmp_path: Path) -> None:
    seconds = iter(range(0, 10_000, 10))
    files = Files(tmp_path, LIMIT, clock=lambda: next(seconds))

    async def dripping() -> dict[str, Any]:
        return {"type": "http.request", "body": b"\r", "more_body": True}

    with pytest.raises(SlowBody, match="bytes a second"):
        asyncio.run(files.receive([(b"content-type", TYPE)], dripping, files.keep))
    assert next(seconds) < 60
    assert left(files) == []


def test_halves_that_a_crash_left_are_swept_at_the_start_and_nothing_else(
    files: Files, content: bytes
) -> None:
    kept = files.keep(send(files, [form(content)]))
    send(files, [form(b"never kept")])
    assert len(left(files)) == 2
    assert left(Files(files.folder, LIMIT)) == [kept.name]


@pytest.mark.parametrize("digest", ["", "../halfeven.db", "0" * 64, ".upload-x"])
def test_only_the_digest_of_a_stored_file_has_a_path(files: Files, digest: str) -> None:
    paths: Callable[[str], Path] = files.path
    with pytest.raises(DamagedFile):
        paths(digest)


def sized(length: int) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", TYPE), (b"content-length", str(length).encode())]


def test_files_have_a_quota_together_and_a_refused_one_does_not_stay(tmp_path: Path, content: bytes) -> None:
    files = Files(tmp_path / "files", LIMIT, most_bytes=200_000)
    first = files.keep(send(files, [form(content)]))
    other = content[::-1]
    for headers in (sized(len(form(other))), sized(0)[:1]):  # before a byte is read, and while they come
        coming = [] if len(headers) > 1 else [form(other)[:100_000], form(other)[100_000:]]
        with pytest.raises(QuotaReached, match="at most 200000 are kept; delete some"):
            send(files, coming or [b""], headers)
        assert left(files) == [first.name]
    files.remove(first.name)
    assert files.keep(send(files, [form(other)], sized(len(form(other))))).stat().st_size == len(other)


@pytest.mark.parametrize("declared", [True, False])
def test_the_bytes_of_all_files_are_counted_again_only_for_bytes_that_were_not_declared(
    declared: bool, files: Files, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To count ten thousand files takes a tenth of a second, and no other upload goes on meanwhile."""
    counted, used = list[int](), files.used
    monkeypatch.setattr(module, "_BLOCK", 8192)
    monkeypatch.setattr(files, "used", lambda: counted.append(1) or used())
    body = form(content)
    pieces = [body[start : start + 8192] for start in range(0, len(body), 8192)]
    send(files, pieces, sized(len(body) + 16_384) if declared else sized(0)[:1])
    assert len(counted) == (1 if declared else 1 + len(pieces))
    assert files._coming == 0 and not files._arriving


@pytest.mark.parametrize("size", [10, 140_000])
def test_on_a_full_disk_an_upload_is_refused_and_nothing_of_it_is_left(
    size: int, files: Files, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_full_disk(prefix: str, dir: Path) -> tuple[int, str]:
        (path := dir / f"{prefix}x").touch()
        return os.open("/dev/full", os.O_WRONLY), str(path)

    monkeypatch.setattr(tempfile, "mkstemp", on_full_disk)
    with pytest.raises(DiskFull, match="disk is full, so the upload was not kept; delete files"):
        send(files, [form(content[:size])])
    assert left(files) == []


def test_an_upload_that_gets_no_lasting_name_does_not_stay(
    files: Files, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rename(path: Path, target: Path) -> None:
        raise OSError(errno.EIO, "bad disk")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": form(content), "more_body": False}

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(OSError, match="bad disk"):
        asyncio.run(files.receive([(b"content-type", TYPE)], receive, files.keep))
    assert left(files) == []


def lasting(**fields: str) -> bytes:
    parts = [part(f"expires_after[{name}]", value.encode()) for name, value in fields.items()]
    return b"".join(parts) + form(b"data")


def test_an_upload_says_how_long_it_is_kept(files: Files) -> None:
    assert send(files, [form(b"data")]).seconds is None
    assert send(files, [lasting(anchor="created_at", seconds="3600")]).seconds == 3600


@pytest.mark.parametrize(
    "fields",
    [
        {"anchor": "created_at"},
        {"seconds": "3600"},
        {"anchor": "last_active_at", "seconds": "3600"},
        {"anchor": "created_at", "seconds": "3599"},
        {"anchor": "created_at", "seconds": "2592001"},
        {"anchor": "created_at", "seconds": "٣٦٠٠"},
    ],
)
def test_another_life_than_openai_has_is_refused_with_its_bounds(
    fields: dict[str, str], files: Files
) -> None:
    with pytest.raises(BadInput, match="expected anchor 'created_at' and 3600 to 2592000 seconds"):
        send(files, [lasting(**fields)])
    assert left(files) == []


def test_uploads_that_begin_at_once_reserve_what_they_declared(tmp_path: Path, content: bytes) -> None:
    """Each upload fits alone, and all of them together do not: the quota is taken before a byte is waited for."""
    body = form(content)
    files = Files(tmp_path / "files", LIMIT, most_bytes=3 * len(body))
    headers = sized(len(body))
    arrived = asyncio.Event()

    async def one() -> bool:
        async def receive() -> Any:
            await arrived.wait()
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            await files.receive(headers, receive, files.keep)
        except QuotaReached:
            return False
        return True

    async def all_at_once() -> list[bool]:
        callers = [asyncio.create_task(one()) for _ in range(10)]
        # The server refuses some of them before a byte has come.
        while sum(caller.done() for caller in callers) < 7:
            await asyncio.sleep(0)
        arrived.set()
        return list(await asyncio.gather(*callers))

    assert sum(asyncio.run(all_at_once())) == 3
    assert files._coming == 0


def test_one_key_cannot_take_the_room_of_all_files(tmp_path: Path, content: bytes) -> None:
    """The bytes of a key in records, those of it that arrive and those that it declares count together."""
    body = form(content)
    files = Files(tmp_path / "files", LIMIT, most_bytes=4 * len(content))

    def sent(owner: str, held: int) -> Any:
        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        kept = files.receive([(b"content-type", TYPE)], receive, files.keep, owner, lambda: held)
        return asyncio.run(kept)

    sent("greedy", 0)
    with pytest.raises(QuotaReached, match="the files of this key would have"):
        sent("greedy", 3 * len(content))
    sent("another", 0)
    assert not files._arriving and files._coming == 0


def test_an_upload_that_fits_at_its_beginning_fits_at_its_end(tmp_path: Path, content: bytes) -> None:
    """As many bytes are free for a key as it may have: those of the upload itself are no others that hold room. A
    refused one leaves no count behind."""
    body = form(content)
    for most, fits in ((2 * len(content), True), (len(content) // 2, False)):
        files = Files(tmp_path / str(most), LIMIT, most_bytes=most)
        for declared in (sized(len(body)), [(b"content-type", TYPE)]):
            pieces = [body[start : start + 40_000] for start in range(0, len(body), 40_000)]

            async def receive(pieces: list[bytes] = pieces) -> Any:
                return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

            with nullcontext() if fits else pytest.raises(QuotaReached):
                for path in files.folder.iterdir():
                    path.unlink()
                asyncio.run(files.receive(declared, receive, files.keep, "a key"))
            assert files._coming == 0 and not files._arriving


def test_uploads_of_one_key_that_begin_together_see_those_that_end_meanwhile(
    tmp_path: Path, content: bytes
) -> None:
    """A key may hold five of ten files: then as much is free. No length is declared, so each counts as it comes."""
    files = Files(tmp_path / "files", LIMIT, most_bytes=10 * len(content))
    kept = list[Upload]()

    def keep(upload: Upload) -> Upload:
        kept.append(upload)
        files.keep(upload)
        return upload

    def held() -> int:
        return sum(upload.bytes for upload in kept)

    async def one(number: int, begun: asyncio.Event) -> bool:
        pieces = iter([form(content[:-1] + bytes([number]))])

        async def receive() -> Any:
            await begun.wait()
            return {"type": "http.request", "body": next(pieces), "more_body": False}

        try:
            await files.receive([(b"content-type", TYPE)], receive, keep, "greedy", held)
        except QuotaReached:
            return False
        return True

    async def one_after_the_other() -> list[bool]:
        starts = [asyncio.Event() for _ in range(10)]
        callers = [asyncio.create_task(one(number, start)) for number, start in enumerate(starts)]
        for start, caller in zip(starts, callers, strict=True):
            start.set()
            await asyncio.wait([caller])
        return [caller.result() for caller in callers]

    assert sum(asyncio.run(one_after_the_other())) == 5
