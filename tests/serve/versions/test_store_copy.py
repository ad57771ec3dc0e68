"""A node's copy of a store: every version once, checked by its digests; the alias moves only to what is here."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from halfeven.models.errors import BadSetting, Conflict, StoreUnusable
from halfeven.models.store.manifest import digest_of
from halfeven.models.store.store import Store
from halfeven.serve.versions import store_copy
from halfeven.serve.versions.orders import drifted, read_orders
from halfeven.serve.versions.store_copy import StoreCopy
from halfeven.serve.versions.store_writer import StoreWriter

from tests.serve.versions.publishing import publish


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = Store(tmp_path / "source")
    store.promote(store.version("net", publish(store, "first")))
    return store


@pytest.fixture
def copy(source: Store, tmp_path: Path) -> StoreCopy:
    return StoreCopy(str(source.root), tmp_path / "copy")


def test_a_copy_follows_versions_alias_orders_drift_and_keys(source: Store, copy: StoreCopy) -> None:
    copy.follow()
    assert copy.store.live_number("net") == 1
    assert copy.store.version("net", 1).bytes("source/model.py") == b"# first"
    writer = StoreWriter(source)
    writer.promote("net", publish(source, "second"))
    writer.order("net", "canary", 1, 10.0)
    writer.note_drift("net", 1, "cpu", "it drifted")
    (source.root / "keys.json").write_text("{}")
    copy.follow()
    assert (
        copy.store.live_number("net") == 2 and copy.store.version("net", 2).bytes("original.pt2") == b"second"
    )
    assert read_orders(copy.store, "net") == read_orders(source, "net")
    assert drifted(copy.store.version("net", 1), "cpu") == "it drifted"
    assert (copy.store.root / "keys.json").stat().st_mode & 0o777 == 0o600
    (source.root / "models/net/drifted-1.json").unlink()
    copy.follow()
    assert drifted(copy.store.version("net", 1), "cpu") is None


def test_a_copy_of_one_model_has_no_other_one_and_no_keys(source: Store, tmp_path: Path) -> None:
    shutil.copytree(source.root / "models/net", source.root / "models/other")
    (source.root / "keys.json").write_text("{}")
    copy = StoreCopy(str(source.root), tmp_path / "one", only="other")
    copy.follow()
    assert copy.store.names() == ["other"] and copy.store.live_number("other") == 1
    assert not (copy.store.root / "keys.json").exists()


def test_a_version_takes_the_place_of_the_one_it_was_made_from_once(source: Store) -> None:
    writer, second, third = StoreWriter(source), publish(source, "second"), publish(source, "third")
    for _ in range(2):  # the first answer may have been lost
        writer.promote_over("net", 1, second, "operator")
        assert source.live_number("net") == second
    with pytest.raises(Conflict, match=f"version 1, but version {second} is active"):
        writer.promote_over("net", 1, third, "operator")


def test_what_was_copied_is_not_fetched_again(source: Store, copy: StoreCopy) -> None:
    copy.follow()
    shutil.rmtree(source.root / "models/net/1/source")  # a second fetch would fail
    copy.follow()
    assert copy.faults() == [] and copy.store.version("net", 1).bytes("source/model.py") == b"# first"


def test_what_was_copied_is_on_the_disk_before_it_has_its_name(
    copy: StoreCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, rename = set[Path](), Path.rename

    def renamed(path: Path, target: Path) -> Path:
        files = {file for file in path.rglob("*") if path.name.startswith(".draft-")}
        assert files <= synced
        synced.difference_update(files)
        return rename(path, target)

    monkeypatch.setattr(store_copy, "fsync", synced.add)
    monkeypatch.setattr(Path, "rename", renamed)
    copy.follow()
    assert copy.store.numbers("net") == [1] and copy.store.root / "models/net" in synced


def test_a_damaged_version_is_named_and_the_alias_stays_where_it_was(source: Store, copy: StoreCopy) -> None:
    copy.follow()
    number = publish(source, "second")
    damaged = source.root / f"models/net/{number}/original.pt2"
    damaged.write_text("sec0nd")
    StoreWriter(source).promote("net", number)
    copy.follow()
    (fault,) = copy.faults()
    assert f"net@{number} cannot be copied" in fault and "models/net/2/original.pt2 is damaged" in fault
    assert copy.store.live_number("net") == 1 and copy.store.numbers("net") == [1]
    damaged.write_text("second")
    os.utime(damaged, (1, 1))  # another time than that of the damage, however coarse the clock
    copy.follow()
    assert copy.faults() == [] and copy.store.live_number("net") == number


def test_a_model_whose_only_version_is_damaged_has_that_fault_alone(source: Store, copy: StoreCopy) -> None:
    (source.root / "models/net/1/original.pt2").write_text("f1rst")
    copy.follow()
    (fault,) = copy.faults()
    assert fault.startswith("net@1 cannot be copied")


@pytest.mark.parametrize("file", ["../outside", "/tmp/outside"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(file: str, source: Store, copy: StoreCopy) -> None:
    path = source.root / "models/net/1/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][file] = "0" * 64
    manifest["digest"] = digest_of(manifest["files"])
    path.write_text(json.dumps(manifest))
    copy.follow()
    assert "which is no file of its folder" in copy.faults()[0] and copy.store.numbers("net") == []


def test_a_version_without_manifest_is_still_being_written(source: Store, copy: StoreCopy) -> None:
    (source.root / "models/net/2").mkdir()
    copy.follow()
    assert copy.faults() == [] and copy.store.numbers("net") == [1]


def test_what_was_deleted_is_deleted_and_a_source_that_is_away_deletes_nothing(
    source: Store, copy: StoreCopy
) -> None:
    StoreWriter(source).promote("net", publish(source, "second"))
    copy.follow()
    shutil.rmtree(source.root / "models/net/1")
    copy.follow()
    copy.follow()
    assert copy.store.numbers("net") == [2]
    source.root.rename(source.root.with_name("away"))
    with pytest.raises(StoreUnusable, match=r"cannot be followed: .* what is loaded is served on"):
        copy.follow()
    assert copy.store.numbers("net") == [2]


@pytest.mark.parametrize("folder", ["models/net", "models/net/1"])
def test_a_folder_that_two_renames_replace_is_not_missed(
    folder: str, source: Store, copy: StoreCopy, tmp_path: Path
) -> None:
    copy.follow()
    for _ in range(2):
        (source.root / folder).rename(tmp_path / "away")
        copy.follow()
        assert copy.store.numbers("net") == [1]
        (tmp_path / "away").rename(source.root / folder)
        copy.follow()
    shutil.rmtree(source.root / folder)
    copy.follow()
    copy.follow()
    assert copy.store.numbers("net") == []


@pytest.fixture
def in_memory(source: Store) -> Iterator[str]:
    """The source store under a URL of fsspec."""
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    fs.put(str(source.root), root, recursive=True)
    yield f"memory:/{root}"
    fs.rm(root, recursive=True)


def test_a_store_of_objects_is_copied_and_followed(in_memory: str, tmp_path: Path) -> None:
    copy = StoreCopy(in_memory, tmp_path / "copy")
    copy.follow()
    assert (
        copy.store.live_number("net") == 1 and copy.store.version("net", 1).bytes("original.pt2") == b"first"
    )
    fs, root = fsspec.core.url_to_fs(in_memory)
    fs.pipe_file(f"{root}/models/net/live", b"7\n")  # version 7 is not there
    copy.follow()
    assert copy.store.live_number("net") == 1


def test_a_change_of_a_store_of_objects_is_written_back(
    in_memory: str, tmp_path: Path, source: Store
) -> None:
    publish(source, "second")
    fs, root = fsspec.core.url_to_fs(in_memory)
    fs.put(str(source.root / "models/net/2"), f"{root}/models/net/2", recursive=True)
    copy = StoreCopy(in_memory, tmp_path / "copy")
    writer = StoreWriter(copy.store)
    copy.change("net", lambda: writer.promote("net", 2))
    copy.change("net", lambda: writer.order("net", "canary", 1, 5.0))
    other = StoreCopy(in_memory, tmp_path / "other")
    other.follow()
    assert other.store.live_number("net") == 2 and set(other.store.promotions("net")) == {1, 2}
    assert read_orders(other.store, "net") == read_orders(copy.store, "net") != read_orders(source, "net")


def test_a_change_that_cannot_be_written_back_is_undone_on_the_whole_node(
    in_memory: str, tmp_path: Path, source: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(source, "second")
    fs, root = fsspec.core.url_to_fs(in_memory)
    fs.put(str(source.root / "models/net/2"), f"{root}/models/net/2", recursive=True)
    copy, replica = (StoreCopy(in_memory, tmp_path / "node") for _ in range(2))
    replica.follow()

    def away(*_: object) -> None:
        raise OSError("the bucket is away")

    with monkeypatch.context() as broken:
        broken.setattr(type(fs), "pipe_file", away)
        with pytest.raises(StoreUnusable, match="cannot be written: the bucket is away"):
            copy.change("net", lambda: StoreWriter(copy.store).promote("net", 2))
        assert copy.store.live_number("net") == 1 and set(copy.store.promotions("net")) == {1}
    StoreWriter(copy.store).promote("net", 2)  # by a writer that was killed before it wrote it back
    for one in (replica, copy):
        one.follow()
    assert copy.store.live_number("net") == 1


def test_a_store_that_was_made_anew_is_copied_anew(source: Store, copy: StoreCopy) -> None:
    copy.follow()
    shutil.rmtree(source.root)
    source.promote(source.version("net", publish(source, "anew")))
    for one in (copy, StoreCopy(str(source.root), copy.store.root)):
        one.follow()
        assert one.store.version("net", 1).bytes("original.pt2") == b"anew"


def test_a_copy_is_kept_only_in_a_folder_of_this_user_alone(source: Store, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(
        StoreUnusable, match="others may write into it; give `cache` a folder of this user's own"
    ):
        StoreCopy(str(source.root), open_to_all)
    with pytest.raises(BadSetting, match=r"store = 'nowhere://x': .*expected a folder or a URL of fsspec"):
        StoreCopy("nowhere://x", tmp_path / "copy")


@pytest.mark.parametrize("deleted", ["models/net/2", "models/net"])
def test_a_damaged_version_that_was_deleted_is_a_fault_no_more(
    deleted: str, source: Store, copy: StoreCopy
) -> None:
    number = publish(source, "second")
    (source.root / f"models/net/{number}/original.pt2").write_text("sec0nd")
    copy.follow()
    assert len(copy.faults()) == 1
    shutil.rmtree(source.root / deleted)
    copy.follow()
    assert copy.faults() == []


def test_a_version_that_another_process_of_the_node_has_copied_since_is_a_fault_no_more(
    source: Store, copy: StoreCopy
) -> None:
    damaged = source.root / "models/net/1/original.pt2"
    damaged.write_text("f1rst")
    copy.follow()
    assert len(copy.faults()) == 1
    damaged.write_text("first")
    StoreCopy(str(source.root), copy.store.root).follow()
    copy.follow()
    assert copy.faults() == []


def test_orders_that_are_damaged_stop_no_rollback(source: Store) -> None:
    """A rollback that is reported as failed is ordered again, and goes back twice."""
    writer = StoreWriter(source)
    for text in ("second", "third"):
        writer.promote("net", publish(source, text))
    (source.root / "models/net/rollout.json").write_text("damaged")
    assert writer.roll_back("net") == 2 == source.live_number("net")


def test_a_model_whose_files_cannot_be_read_stops_no_other_one(
    source: Store, copy: StoreCopy, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(source.root / "models/net", source.root / "models/other")
    copy.follow()
    (source.root / "models/net/rollout.json").write_bytes(b" " * 2**25)
    shutil.copytree(source.root / "models/net/1", source.root / "models/other/2")
    copy.follow()
    copy.follow()
    (fault,) = copy.faults()
    assert [record.getMessage() for record in caplog.records] == [fault], "once"
    assert fault.startswith("net cannot be followed: models/net/rollout.json has 33554432 bytes")
    assert (copy.store.root / "models/other/2").is_dir()
    (source.root / "models/net/rollout.json").unlink()
    copy.follow()
    assert copy.faults() == []
