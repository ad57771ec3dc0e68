"""`halfeven backup`: a copy of a store in use, checked by its digests, from which a server starts."""

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from halfeven.models.errors import Conflict, DamagedFile, NewerFormat, StoreUnusable
from halfeven.models.store.manifest import FORMAT
from halfeven.models.store.store import LIVE, Store
from halfeven.serve.backup import back_up
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from halfeven.serve.versions.store_copy import StoreCopy

from tests.command_line import run
from tests.model_folders import write_folder
from tests.serve.conftest import running
from tests.serve.versions.publishing import publish

DIGEST = hashlib.sha256(b"rows").hexdigest()


def quiet(_: str) -> None: ...


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A version, a key file, an upload, and the unfinished files of others."""
    store = Store(tmp_path / "store")
    store.promote(store.version("net", publish(store, "first")))
    (store.root / "keys.json").write_text("{}")
    (store.root / "files").mkdir()
    (store.root / "files" / DIGEST).write_bytes(b"rows")
    (store.root / "files" / ".upload-1").write_bytes(b"arriving")
    (store.root / "models/net/.draft-1").mkdir()
    return store


@pytest.fixture
def jobs(store: Store) -> Any:
    """The job store of a server that runs."""
    jobs = JobStore(store.root / "halfeven.db")
    jobs.add_file(FileRecord("file-1", DIGEST, 4, "rows.npz", 1))
    yield jobs
    jobs.close()


def test_a_backup_has_what_was_acknowledged_and_nothing_unfinished(
    store: Store, jobs: JobStore, tmp_path: Path
) -> None:
    facts = back_up(store, tmp_path / "backup", quiet)
    assert facts == {
        "folder": str(tmp_path / "backup"),
        "versions": {"net": [1]},
        "uploads": 1,
        "damaged": [],
    }
    copy = Store(tmp_path / "backup")
    assert copy.live_number("net") == 1 and copy.version("net", 1).bytes("original.pt2") == b"first"
    found = {path.relative_to(copy.root).as_posix() for path in copy.root.rglob("*") if path.is_file()}
    version = {f"models/net/1/{file}" for file in ("manifest.json", "original.pt2", "source/model.py")}
    named = {"models/net/live", "models/net/promotions.json", "keys.json", "halfeven.db", f"files/{DIGEST}"}
    assert found == version | named
    assert copy.root.stat().st_mode & 0o777 == 0o700
    restored = JobStore(copy.root / "halfeven.db")
    assert [record.id for record in restored.files()] == ["file-1"]
    restored.close()


def test_a_version_that_is_made_active_during_a_backup_is_in_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published and promoted after the versions were listed, before the alias is read."""
    from halfeven.serve.versions.store_copy import StoreCopy

    copy_version = StoreCopy._copy_version

    def meanwhile(self: StoreCopy, name: str, number: int) -> None:
        copy_version(self, name, number)
        if store.numbers("net") == [1]:
            store.promote(store.version("net", publish(store, "second")))

    monkeypatch.setattr(StoreCopy, "_copy_version", meanwhile)
    back_up(store, tmp_path / "backup", quiet)
    copy = Store(tmp_path / "backup")
    assert copy.live_number("net") == 2 and copy.version("net", 2).bytes("original.pt2") == b"second"


def test_a_backup_of_a_database_that_is_written_meanwhile_is_one_state_of_it(
    store: Store, jobs: JobStore, tmp_path: Path
) -> None:
    """Each transaction adds two files: a copy between them would have an odd number."""
    stop, began = threading.Event(), threading.Event()

    def write() -> None:
        for number in range(10**6):
            with jobs._db.transaction():
                jobs.add_file(FileRecord(f"file-a{number}", f"{number:064}", 1, "a", 1))
                jobs.add_file(FileRecord(f"file-b{number}", f"{number:064}", 1, "b", 1))
            began.set()
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    began.wait()
    try:
        for number in range(5):
            back_up(store, tmp_path / f"backup-{number}", quiet)
            restored = JobStore(tmp_path / f"backup-{number}" / "halfeven.db")
            assert len(restored.files()) % 2 == 1  # and the one that was there before
            restored.close()
    finally:
        stop.set()
        writer.join()


def test_what_is_damaged_is_named_and_left_out_and_the_rest_is_copied(store: Store, tmp_path: Path) -> None:
    number = publish(store, "second")
    store.promote(store.version("net", number))
    (store.root / f"models/net/{number}/original.pt2").write_text("sec0nd")
    (store.root / "files" / DIGEST).write_bytes(b"r0ws")
    facts = back_up(store, tmp_path / "backup", quiet)
    assert facts["versions"] == {"net": [1]} and facts["uploads"] == 0
    upload, version, alias = facts["damaged"]
    assert "its SHA-256 is not its name" in upload and "models/net/2/original.pt2 is damaged" in version
    assert alias.startswith("net is copied without an active version")


def test_of_a_backup_that_the_disk_has_no_room_for_nothing_is_left(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(StoreCopy, "_fetch", full)
    with pytest.raises(StoreUnusable, match="No space left"):
        back_up(store, tmp_path / "backup", quiet)
    assert not (tmp_path / "backup").exists()


def test_a_backup_is_refused_where_it_would_mix_with_other_files_or_has_nothing_to_copy(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(Conflict, match="is not an empty folder: expected a new or an empty one"):
        back_up(store, tmp_path / "other", quiet)
    with pytest.raises(StoreUnusable, match=r"has no model; give --store"):
        back_up(Store(tmp_path / "nowhere"), tmp_path / "backup", quiet)
    (store.root / "halfeven.db").write_text(
        "no database at all, only text that is long enough to be read as one"
    )
    with pytest.raises(DamagedFile, match=r"halfeven\.db cannot be copied"):
        back_up(store, tmp_path / "backup", quiet)
    assert not (tmp_path / "backup").exists() and not list(tmp_path.glob(".backup-*"))


@pytest.mark.slow
def test_a_server_starts_from_a_backup_that_was_taken_of_a_running_one(
    tmp_path: Path, random: np.random.Generator
) -> None:
    folder = write_folder(tmp_path / "net")
    assert run("convert", folder, "--store", tmp_path / "store")[0] == 0
    x = random.normal(size=(2, 4)).astype(np.float32).tolist()
    with running(build(read_settings(device="cpu"), Store(tmp_path / "store"))[0]) as address:
        expected = httpx.post(f"http://{address}/v1/models/net:predict", json={"instances": x}).json()
        code, facts, _ = run("backup", tmp_path / "backup", "--store", tmp_path / "store")
        assert (code, facts["versions"]) == (0, {"net": [1]})
    with running(build(read_settings(device="cpu"), Store(tmp_path / "backup"))[0]) as address:
        answered = httpx.post(f"http://{address}/v1/models/net:predict", json={"instances": x}).json()
    assert answered == expected


def test_a_version_of_a_later_format_is_refused_by_name_and_one_without_a_format_is_read(
    store: Store,
) -> None:
    path = store.root / "models/net/1/manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["format"] == FORMAT and manifest["status"] == LIVE
    del manifest["format"]  # as releases before the first format wrote it
    path.write_text(json.dumps(manifest))
    assert store.version("net", 1).bytes("original.pt2") == b"first"
    path.write_text(json.dumps(manifest | {"format": FORMAT + 1}))
    with pytest.raises(
        NewerFormat, match=rf"has format {FORMAT + 1}.*reads 1 to {FORMAT}: a later one wrote it"
    ):
        store.version("net", 1)
    for wrong in (0, -1, "1", True, None):
        path.write_text(json.dumps(manifest | {"format": wrong}))
        with pytest.raises(DamagedFile, match="its format is"):
            store.version("net", 1)
