"""A file that is opened once, so that the checked bytes are the ones that are read, also where the path is replaced.

Every file that a stranger may have made (of the store, of another server's models, of an archive, an upload) is opened
here: a regular file, of a bounded size where it is read whole, and with `opened_inside` in the folder where it belongs.
"""

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
    Raises OSError, also where the last part of the path is a symbolic link, the file is no regular one, or has more
    than ``most_bytes``.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path = path
        # Without O_NONBLOCK a FIFO would block.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if most_bytes is not None and found.st_size > most_bytes:
            os.close(handle)
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, at most {most_bytes} are read", str(path))
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


def opened_named(path: Path, most_bytes: int | None = None) -> OpenedFile:
    """A file that the user names, wherever symbolic links lead; it keeps the name that it was given. Raises OSError as
    `OpenedFile`."""
    opened = OpenedFile(_resolved(path), most_bytes)
    opened.path = path
    return opened


def opened_inside(folder: Path, path: Path, most_bytes: int | None = None) -> OpenedFile:
    """A file in ``folder`` or below it, wherever symbolic links on its way lead.

    Raises OSError as `OpenedFile`, and where the file lies outside of the folder.
    """
    root, place = folder.resolve(), _resolved(path)
    if not place.is_relative_to(root):
        raise OSError(errno.EXDEV, f"it leads out of the folder {folder.name}", str(path))
    opened = OpenedFile(place, most_bytes)
    # The open file is another one where a folder on the way was replaced by a link since.
    if (linked := opened.again) != place and not linked.resolve().is_relative_to(root):
        opened.close()
        raise OSError(errno.EXDEV, f"it leads out of the folder {folder.name}", str(path))
    return opened


def _resolved(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except RuntimeError as error:  # Python up to 3.12, for a loop of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
