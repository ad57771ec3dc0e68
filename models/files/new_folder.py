"""A folder that is there whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import Conflict


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` that takes its place at the end, and vanishes where the block fails.

    Raises Conflict where ``target`` is there and is not an empty folder.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise _occupied(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError as error:  # it was written into meanwhile: what is not empty is never replaced
            raise _occupied(target) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _occupied(target: Path) -> Conflict:
    return Conflict(f"{target} is not an empty folder: expected a new or an empty one; nothing was written")
