"""The files of another server's models. Each lies in the folder that was given to import, also where links lead."""

from pathlib import Path

from ...models.errors import BadFolder, TooLarge
from ...models.files.opened_file import OpenedFile, opened_inside


def foreign_file(folder: Path, path: Path, what: str) -> OpenedFile:
    """Raises BadFolder for a file that is not there, is no regular one, or lies outside of ``folder``."""
    try:
        return opened_inside(folder, path)
    except OSError as error:
        raise BadFolder(
            f"{path} cannot be taken ({error.strerror}): expected {what}, a regular file inside {folder}"
        ) from error


def foreign_bytes(folder: Path, path: Path, most_bytes: int, what: str) -> bytes:
    """All bytes of a file. Raises BadFolder as `foreign_file`, TooLarge beyond ``most_bytes``."""
    with foreign_file(folder, path, what) as opened:
        data = opened.handle.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLarge(f"{path} is larger than {most_bytes} bytes: expected {what}")
    return data


def foreign_text(folder: Path, path: Path, most_bytes: int, what: str) -> str:
    """The text of a file. Raises as `foreign_bytes`, BadFolder where it is not UTF-8."""
    try:
        return foreign_bytes(folder, path, most_bytes, what).decode()
    except UnicodeDecodeError as error:
        raise BadFolder(f"{path} is not UTF-8 text ({error})") from error
