"""Files that are on the disk when the call returns, and folders whose changes are; and whether the disk is full."""

import errno
import os
import tempfile
from pathlib import Path

READABLE = 0o644


def no_space_left(error: BaseException) -> bool:
    """Whether ``error`` is of a write that failed because the disk, or the disk quota of the server's user, is full.

    Libraries that write by themselves (safetensors, SQLite) have only the system's words in theirs.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(error) for words in (os.strerror(errno.ENOSPC), "disk is full"))


def fsync(path: Path) -> None:
    """Make a file's bytes, or the entries of a folder (created or renamed ones), durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, mode: int = READABLE) -> None:
    """Put ``text`` in the place of a file by one atomic rename. Durable when this returns. Raises OSError."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(handle, mode)  # mkstemp's is for its owner alone; the server may be another user
            os.fsync(handle)
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
    fsync(path.parent)
