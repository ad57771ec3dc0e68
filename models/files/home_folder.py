"""Paths that begin with ``~``. A shell expands ``--store ~/models`` and leaves ``--store=~/models`` as it is; nobody
expands a variable of a service. Every path of an option or a setting passes here, so that all mean the same folder."""

from pathlib import Path

from ..errors import BadSetting


def at_home(path: Path) -> Path:
    """The path, with the user's home folder in place of a leading ``~``. Raises BadSetting where there is no such
    user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise BadSetting(
            f"{path}: expected ~ or ~USER at its beginning, {path.parts[0]} is no user here; write the whole path"
        ) from error
