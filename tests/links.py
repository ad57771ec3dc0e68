"""Files as a download cache has them: links to files of one folder, which have other names."""

from collections.abc import Sequence
from pathlib import Path


def behind_links(files: Sequence[Path], cache: Path) -> None:
    """Move the files into the folder ``cache``, and put a link in the place of each."""
    cache.mkdir()
    for number, file in enumerate(files):
        blob = file.rename(cache / str(number))
        file.symlink_to(blob)
