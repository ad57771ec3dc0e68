"""A folder that lives as long as the block, or the process, that made it."""

import subprocess
import sys
from pathlib import Path

from halfeven.models.files.durable import remove_dead_folders, temporary_folder


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
