"""A folder that lives as long as the block, or the process, that made it; a folder that takes its place at the end."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from halfeven.models.files.durable import new_folder, remove_dead_folders, temporary_folder


def test_the_folder_of_a_process_that_was_killed_is_removed_and_one_in_use_stays(tmp_path: Path) -> None:
    killed = """
import os, sys
from pathlib import Path
from halfeven.models.files.durable import temporary_folder

with temporary_folder(Path(sys.argv[1]), ".draft-") as folder:
    (folder / "weights").touch()
    os._exit(1)
"""
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    (dead,) = tmp_path.iterdir()
    with temporary_folder(tmp_path, ".draft-") as used:
        remove_dead_folders(tmp_path.iterdir())
        assert [*tmp_path.iterdir()] == [used] != [dead]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("private", "mode"), [(False, 0o750), (True, 0o700)])
def test_a_new_folder_has_the_mode_of_any_new_folder_unless_it_is_private(
    private: bool, mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "new", private) as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "while it is filled"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode and not [*(tmp_path / "new").iterdir()]
