"""A file that is opened once: which path a reader without a handle gets."""

import os
from pathlib import Path

import pytest
from halfeven.models.files import opened_file
from halfeven.models.files.opened_file import OpenedFile, opened_inside, opened_named


def test_another_file_at_its_path_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    with OpenedFile(path) as opened:
        (tmp_path / "other").write_bytes(b"second")
        (tmp_path / "other").rename(path)
        assert opened.again.read_bytes() == opened.read() == b"first"


def test_where_the_system_has_no_paths_of_handles_its_own_path_is_read_each_time_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_file, "_HANDLES", tmp_path / "none")
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    with OpenedFile(path) as opened:
        assert [opened.again.read_bytes() for _ in range(2)] == [b"first"] * 2


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "outside" / "secret"
    file.parent.mkdir()
    file.write_bytes(b"secret")
    return file


@pytest.mark.parametrize(
    "way", ["a link", "a link to a link", "a folder that is a link", "dots", "a loop", "a pipe"]
)
def test_what_is_no_file_of_the_folder_is_not_opened(tmp_path: Path, outside: Path, way: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "file"
    if way == "a link":
        path.symlink_to(outside)
    elif way == "a link to a link":
        (folder / "other").symlink_to(outside)
        path.symlink_to(folder / "other")
    elif way == "a folder that is a link":
        (folder / "inner").symlink_to(outside.parent)
        path = folder / "inner" / "secret"
    elif way == "dots":
        path = folder / ".." / "outside" / "secret"
    elif way == "a loop":
        path.symlink_to(path)
    else:
        os.mkfifo(path)
    with pytest.raises(OSError, match=r"leads out|Too many levels|not a regular file"):
        opened_inside(folder, path)


@pytest.mark.parametrize(
    "way", ["a pipe", "a folder", "a loop of links", "a link to a device", "a link to nothing"]
)
def test_what_the_user_names_is_a_file(tmp_path: Path, way: str) -> None:
    place = tmp_path / "named"
    match way:
        case "a pipe":
            os.mkfifo(place)
        case "a folder":
            place.mkdir()
        case _:
            place.symlink_to(
                {"a loop of links": "named", "a link to a device": "/dev/zero"}.get(way, "nothing")
            )
    with pytest.raises(OSError, match=r"named|regular|nothing"):
        opened_named(place)
    place.rmdir() if place.is_dir() else place.unlink()
    (tmp_path / "file").write_bytes(b"1")
    place.symlink_to("file")
    with opened_named(place) as opened:
        assert opened.read() == b"1" and opened.path == place


def test_a_link_inside_of_the_folder_is_followed_and_a_size_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "file").write_bytes(b"12345")
    (folder / "2").symlink_to("1")
    with opened_inside(folder, folder / "2" / "file", 5) as opened:
        assert opened.read() == b"12345"
    with pytest.raises(OSError, match="5 bytes, at most 4 are read"):
        opened_inside(folder, folder / "2" / "file", 4)


def test_a_folder_that_becomes_a_link_while_the_file_is_opened_leads_nowhere(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "folder" / "inner"
    inner.mkdir(parents=True)
    (inner / "secret").write_bytes(b"own")
    looked_at = opened_file._resolved

    def resolved(path: Path) -> Path:
        found = looked_at(path)
        (inner / "secret").unlink()
        inner.rmdir()
        inner.symlink_to(outside.parent)
        return found

    monkeypatch.setattr(opened_file, "_resolved", resolved)
    with pytest.raises(OSError, match="leads out"):
        opened_inside(tmp_path / "folder", inner / "secret")
