"""Files that are on the disk when the call returns, and folders whose changes are; their locks; new folders, which are
there whole or not at all; and whether the disk is full."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import BadSetting, Conflict

READABLE = 0o644
PRIVATE = 0o600  # for callers' data
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNFINISHED = ".unfinished"  # the end of the name of a file that `replace_bytes` is still writing


def no_space_left(error: BaseException) -> bool:
    """True for the error of a write for which the disk, or the disk quota of the server's user, has no space left.

    The errors of libraries that write by themselves (safetensors, SQLite) are known by the system's words alone.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(error) for words in (os.strerror(errno.ENOSPC), "disk is full"))


def may_not_be_written(error: BaseException) -> bool:
    """True for the errors that only a write has: no space is left, or the disk is read-only (by now)."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def free_there(path: Path) -> str:
    """The number of bytes that are free on the disk of a file that need not exist, in words for a message."""
    there = next((place for place in (path, *path.parents) if place.exists()), Path("/"))
    try:
        return f"{shutil.disk_usage(there).free} bytes are free there"
    except OSError:
        return "how much is free there cannot be seen"


def fsync(path: Path) -> None:
    """Make a file's bytes, or the entries of a folder (created or renamed ones), durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, mode: int = READABLE) -> None:
    """`replace_bytes` with a text in UTF-8."""
    replace_bytes(path, text.encode(), mode)


def replace_bytes(path: Path, data: bytes, mode: int = READABLE) -> None:
    """Put ``data`` in the place of a file by one atomic rename. Durable when this returns. Raises OSError, which names
    the file.

    Where the process is killed meanwhile, `remove_dead_files` deletes what it had written.
    """
    try:
        _replace(path, data, mode)
    except OSError as error:  # of a write it has no name, of another call that of the unfinished file
        raise OSError(error.errno, error.strerror, str(path)) from error
    fsync(path.parent)


def _replace(path: Path, data: bytes, mode: int) -> None:
    handle, draft = _locked_file(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, mode)  # mkstemp's is for its owner alone; the server may be another user
            os.fsync(handle)
            Path(draft).replace(path)  # while the lock is held: `remove_dead_files` deletes what nobody holds
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``, a folder or a file, which is made where there is none: one block at a time, over all
    processes and threads. Raises OSError where it cannot be opened."""
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_dir():
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    else:
        try:
            handle = os.open(path, os.O_RDWR | flags, READABLE)
        except PermissionError:  # another user made it: reading is enough to lock on a local disk
            handle = os.open(path, os.O_RDONLY | flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # with the handle the lock goes


def remove_dead_files(folder: Path) -> None:
    """Delete the unfinished files of processes that were killed in `replace_bytes`. A process that still writes holds a
    lock on its file, and that file stays."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for path in _unlocked(folder.glob(f".*{_UNFINISHED}"), flags):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _unlocked(paths: Iterable[Path], flags: int) -> Iterator[Path]:
    """The paths whose lock no process holds; the lock is held here while the caller has the path."""
    for path in paths:
        try:
            handle = os.open(path, flags)
        except OSError:
            continue  # renamed or deleted meanwhile
        with ExitStack() as held, suppress(OSError):
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path


def _locked_file(path: Path) -> tuple[int, str]:
    """A new file beside ``path``, open and locked. The system gives the lock back however the process ends."""
    while True:
        handle, draft = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=_UNFINISHED, dir=path.parent)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if Path(draft).exists():  # nobody removed it before it was locked
            return handle, draft
        os.close(handle)


@contextmanager
def temporary_folder(place: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``place``, which is made where there is none. The folder vanishes when the block ends; where the
    process is killed, `remove_dead_folders` deletes it: the system gives its lock back however the process ends."""
    path, lock = _locked_folder(place, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_folder(place: Path, prefix: str) -> tuple[Path, int]:
    while True:
        place.mkdir(parents=True, exist_ok=True)
        try:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            lock = os.open(path, _FOLDER)
        except FileNotFoundError:  # another process removed this one, or the place
            continue
        with suppress(OSError):  # NFS locks no folder, so that nobody deletes one there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_dir():  # nobody removed it before it was locked
            return path, lock
        os.close(lock)


def remove_dead_folders(paths: Iterable[Path]) -> None:
    """Delete those of the folders of `temporary_folder` whose processes were killed: their locks are gone."""
    for path in _unlocked(paths, _FOLDER):
        shutil.rmtree(path, ignore_errors=True)


def check_new_folder(option: str, folder: Path) -> None:
    """Say before the work, which may be long, that no new folder can be made there. Raises BadSetting, which names the
    ``option``."""
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadSetting(f"{option} {folder} is not an empty folder: expected a new or an empty one")
    above = next(one for one in (folder, *folder.parents) if one.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise BadSetting(
            f"{option} {folder}: {above} is not a folder that you may write to; give another {option}"
        )


@contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """The path of a draft of ``target``, in a hidden folder beside it, for libraries that write by themselves. At the
    end the files of that folder take their places beside ``target``, its own last; where the block fails, none does."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        draft = Path(folder) / target.name
        yield draft
        for file in sorted(draft.parent.iterdir(), key=draft.__eq__):
            file.replace(target.with_name(file.name))


@contextmanager
def new_folder(target: Path, private: bool = False) -> Iterator[Path]:
    """A hidden folder beside ``target`` that takes its place at the end, and vanishes where the block fails.
    ``private``: only its owner may open it at the end too; else it then has the mode that any new folder has.

    Raises Conflict where ``target`` is there and is not an empty folder.
    """
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise _occupied(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        if not private:
            _open_as_usual(folder)
        try:
            folder.rename(target)
        except OSError as error:  # it was written into meanwhile: what is not empty is never replaced
            raise _occupied(target) from error
        fsync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_as_usual(folder: Path) -> None:
    """Add to a folder's mode what any new folder's has: mkdtemp's is for its owner alone."""
    usual = folder / ".mode"
    usual.mkdir()
    folder.chmod(stat.S_IMODE(folder.stat().st_mode | usual.stat().st_mode))
    usual.rmdir()


def _occupied(target: Path) -> Conflict:
    return Conflict(f"{target} is not an empty folder: expected a new or an empty one; nothing was written")
