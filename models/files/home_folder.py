"""Paths that begin with ``~``. A shell expands ``--store ~/models``, but not ``--store=~/models``, and systemd expands
no variable of a service. Settings and path options are expanded here, so that all of them name the same folder."""

from pathlib import Path

from ..errors import BadSetting


def at_home(path: Path) -> Path:
    """The path, with the user's home folder in place of a leading ``~``. Raises BadSetting where there is no such
    user."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise BadSetting(
            f"{path}: expected ~ or ~USER at its beginning, {path.parts[0]} is no user here; write the full path"
        ) from error
