"""Room for going back: a file in the store that is given up when the disk is full, so that a rollback still works, and
an uploaded file can be deleted.

Both write a little, just when something went wrong, and a full disk is one of the things that do. The file is made
when a server starts, and again after it was used.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import DiskFull
from ..files.durable import no_space_left

BYTES = 256 * 1024
_NAME = ".reserve"
T = TypeVar("T")


def keep_reserve(root: Path) -> None:
    """Make the reserve file of the store at ``root``, where there is none and the disk has room for it."""
    path = root / _NAME
    with suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, os.urandom(BYTES))  # blocks of its own on every file system
            os.fsync(handle)
        except OSError:
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def with_reserve(root: Path, deed: Callable[[], T]) -> T:
    """The deed's result; where the disk is full, it is done once more without the reserve file. Raises what the deed
    does."""
    try:
        return deed()
    except (OSError, DiskFull) as error:
        if not (isinstance(error, DiskFull) or no_space_left(error)) or not _given_up(root):
            raise
    try:
        return deed()
    finally:
        keep_reserve(root)


def _given_up(root: Path) -> bool:
    try:
        (root / _NAME).unlink()
    except OSError:
        return False
    return True
