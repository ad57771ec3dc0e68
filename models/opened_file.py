"""A file that is opened once, so that the checked bytes are the ones that are read, also where the path is replaced."""

import errno
import hashlib
import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

_HANDLES = Path("/proc/self/fd")


class OpenedFile(AbstractContextManager["OpenedFile"]):
    """A regular file, open for reading: ``path`` is its name, for messages alone.

    Another file that is moved to that name is not seen. Bytes that another process overwrites in place are: the
    store's files are never changed, and only their owner may do that.
    Raises OSError, also where the last part of the path is a symbolic link or the file is no regular one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        handle = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )  # a FIFO would block
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self.handle = os.fdopen(handle, "rb")

    @property
    def again(self) -> Path:
        """A path to this very file, while it is open: for readers that take no handle.

        Where the system has none (only Linux has), the file's own path, which names this file as long as nobody moves
        another one to it.
        """
        linked = _HANDLES / str(self.handle.fileno())
        return linked if _HANDLES.is_dir() else self.path

    def sha256(self) -> str:
        self.handle.seek(0)
        digest = hashlib.file_digest(self.handle, "sha256").hexdigest()
        self.handle.seek(0)
        return digest

    def read(self) -> bytes:
        """All bytes, from the beginning."""
        self.handle.seek(0)
        return self.handle.read()

    def close(self) -> None:
        self.handle.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
