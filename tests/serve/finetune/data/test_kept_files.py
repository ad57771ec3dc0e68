"""Bytes and records of uploads come and go together; what has expired goes once no job needs it."""

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from halfeven.models.errors import DiskFull, StoreError, UnknownName
from halfeven.models.store.reserve import keep_reserve
from halfeven.serve.access.keys import Owners
from halfeven.serve.finetune.data import files, kept_files
from halfeven.serve.finetune.data.files import Files, QuotaReached, Upload
from halfeven.serve.finetune.data.kept_files import KeptFiles
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import CANCELLED, JobRequest

from tests.serve.clock import Clock


class Place:
    def __init__(self, root: Path) -> None:
        self.clock = Clock(1_000_000.0)
        self.job_store = JobStore(root / "halfeven.db", self.clock)
        self.files = Files(root / "files", 1000)
        self.kept = KeptFiles(self.job_store, self.files, self.clock)

    def upload(self, content: bytes, seconds: int | None = None, name: str = "rows.npz") -> Upload:
        path = self.files.folder / f".upload-{name}"
        path.write_bytes(content)
        return Upload(hashlib.sha256(content).hexdigest(), len(content), name, path, seconds)

    def known(self) -> set[str]:
        return {record.id for record in self.job_store.files()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.job_store.close()


def test_a_file_is_deleted_when_its_time_is_over(place: Place) -> None:
    brief, lasting = place.kept.keep(place.upload(b"brief", 3600)), place.kept.keep(place.upload(b"lasting"))
    assert (brief.expires_at, lasting.expires_at) == (1_003_600, None)
    place.clock.now += 3599
    place.kept.delete_expired()
    assert place.known() == {brief.id, lasting.id}
    place.clock.now += 1
    place.kept.delete_expired()
    assert place.known() == {lasting.id} and place.files.contents() == {lasting.sha256}
    with pytest.raises(UnknownName):
        place.job_store.file(brief.id)


def test_a_file_is_deleted_where_the_disk_is_full(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could make room otherwise."""
    root = place.files.folder.parent
    kept, delete = place.kept.keep(place.upload(b"rows")), place.job_store.delete_file
    keep_reserve(root)

    def on_a_full_disk(id: str, owners: Owners = None) -> bool:
        if (root / ".reserve").exists():
            raise DiskFull("full")
        return delete(id, owners)

    monkeypatch.setattr(place.job_store, "delete_file", on_a_full_disk)
    place.kept.delete(kept.id)
    assert place.known() == set() == place.files.contents() and (root / ".reserve").exists()


@pytest.mark.parametrize("use", ["training_file", "validation_file"])
def test_a_file_that_a_job_needs_stays_until_the_job_has_ended(use: str, place: Place) -> None:
    needed, other = place.kept.keep(place.upload(b"needed", 3600)), place.kept.keep(place.upload(b"other"))
    chosen = {"training_file": other.id, "validation_file": None, use: needed.id}
    job, _ = place.job_store.create_job(JobRequest("net", "net", 1, hyperparameters={}, seed=1, **chosen))  # type: ignore[arg-type]
    place.clock.now += 10_000
    place.kept.delete_expired()
    assert place.known() == {needed.id, other.id}
    assert place.job_store.usable_file(other.id) == other
    with pytest.raises(UnknownName, match="has expired"):
        place.job_store.usable_file(needed.id)
    place.job_store.move(job.id, CANCELLED, code="CANCELLED", message="no more")
    place.kept.delete_expired()
    assert place.known() == {other.id}


def test_the_same_file_sent_again_is_another_one_with_an_end_of_its_own(place: Place) -> None:
    """The caller who sent the first one counts on it."""
    lasting = place.kept.keep(place.upload(b"same"), "key")
    brief = place.kept.keep(place.upload(b"same", 3600), "key")
    assert place.kept.bytes_of("key") == 4
    place.kept.delete(brief.id)
    assert place.job_store.file(lasting.id) == lasting and place.files.contents() == {lasting.sha256}
    place.kept.delete(lasting.id)
    assert place.files.contents() == set()


def test_bytes_without_a_record_do_not_stay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(record: object) -> None:
        raise StoreError("the database cannot be written")

    place.kept.keep(place.upload(b"known"))
    with monkeypatch.context() as broken:
        broken.setattr(place.job_store, "add_file", refused)
        for content in (b"new", b"known"):
            with pytest.raises(StoreError):
                place.kept.keep(place.upload(content, name="other.npz"))
    assert place.files.contents() == {hashlib.sha256(b"known").hexdigest()}


def test_bytes_that_are_not_on_the_disk_for_certain_do_not_stay(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have their lasting name then, and no record."""

    def fsync(folder: Path) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(files, "fsync", fsync)
    with pytest.raises(OSError, match="bad disk"):
        place.kept.keep(place.upload(b"new"))
    assert place.files.contents() == set() == place.known()


def test_a_key_has_so_many_files_whatever_their_bytes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MOST_FILES", 2)
    for name in ("one.npz", "two.npz"):
        place.kept.keep(place.upload(b"same", name=name), "greedy")
    for content, name in ((b"same", "two.npz"), (b"other", "three.npz")):
        with pytest.raises(QuotaReached, match="2 files are here of at most 2"):
            place.kept.keep(place.upload(content, name=name), "greedy")
    place.kept.keep(place.upload(b"mine"), "modest")
    assert place.files.contents() == {hashlib.sha256(one).hexdigest() for one in (b"same", b"mine")}
    assert len(place.known()) == 3 and not list(place.files.folder.glob(".upload-*"))


def test_what_a_server_that_was_killed_left_is_deleted_by_the_next(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    kept = place.kept.keep(place.upload(b"known"))
    place.files.keep(place.upload(b"without a record"))
    KeptFiles(place.job_store, place.files, place.clock)
    assert place.files.contents() == {kept.sha256}
    assert "does not know were deleted: 1" in caplog.text


def test_beside_a_new_database_the_files_of_the_one_before_stay(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged database is moved away: the files are the last copy of what jobs learnt from."""
    for content in (b"one", b"other"):
        place.files.keep(place.upload(content))
    KeptFiles(place.job_store, place.files, place.clock)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert len(place.files.contents()) == 2
    assert "has files: 2. They stay" in warning and "bring it back" in warning
