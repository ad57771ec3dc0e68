"""A file that is opened once: which path a reader without a handle gets."""

from pathlib import Path

import pytest
from halfeven.models import opened_file
from halfeven.models.opened_file import OpenedFile


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
