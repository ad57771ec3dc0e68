"""Unpacks a TorchServe archive (``.mar``, a zip file) of unknown origin: bounded, and never outside its folder."""

import errno
import shutil
import stat
import zipfile
from pathlib import Path, PurePosixPath

from ...models.errors import BadFolder, HalfevenError, TooLarge

MAX_MEMBERS = 10_000
MAX_BYTES = 64 << 30  # unpacked, all members together
# Weights hardly compress: an archive whose content is more than this many times as large was made to fill a disk.
MAX_RATIO = 50
FREE_BYTES = 256 << 20  # unpacked; up to this size the ratio is not checked
_ENCRYPTED = 1
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EIO, errno.EROFS)


def unpack(path: Path, folder: Path) -> None:
    """Write every member below an empty ``folder``.

    Raises BadFolder for a file that is no zip archive, is damaged, or has a member that is no plain file inside the
    folder, TooLarge beyond the bounds. The sizes that are checked are those that are read: Python's reader gives no
    more bytes of a member than its header says.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            _bound(path, members)
            for member in members:
                target = folder / _place(path, member)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise BadFolder(f"{path} has two members in one place: {Path(error.filename).name}") from error
    except Exception as error:  # zipfile and its decompressors raise many kinds on damaged bytes
        if isinstance(error, HalfevenError) or (isinstance(error, OSError) and error.errno in _OF_THE_DISK):
            raise
        raise BadFolder(f"{path} is not a whole zip archive, which a .mar file is: {error}") from error


def _bound(path: Path, members: list[zipfile.ZipInfo]) -> None:
    total = sum(member.file_size for member in members)
    most = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * path.stat().st_size))
    if len(members) > MAX_MEMBERS or total > most:
        raise TooLarge(
            f"{path} has {len(members)} members of {total} bytes unpacked: expected at most {MAX_MEMBERS}, and of an "
            f"archive of {path.stat().st_size} bytes at most {most}"
        )


def _place(path: Path, member: zipfile.ZipInfo) -> PurePosixPath:
    name, place = member.orig_filename, PurePosixPath(member.orig_filename)
    wrong = not place.parts or place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name
    if wrong or ":" in place.parts[0]:
        raise BadFolder(
            f"{path}: the member {name!r} lies outside the archive's folder; nothing of it is taken"
        )
    if stat.S_ISLNK(member.external_attr >> 16):
        raise BadFolder(f"{path}: the member {name!r} is a link: expected files alone")
    if member.flag_bits & _ENCRYPTED:
        raise BadFolder(f"{path}: the member {name!r} is encrypted: pack the archive without a password")
    return place
