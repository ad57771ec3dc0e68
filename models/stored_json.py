"""Small files that were written to the store, and may be damaged or replaced since: texts and JSON."""

import json
from pathlib import Path
from typing import Any

from .opened_file import OpenedFile

MOST_BYTES = 64 * 2**20


def stored_bytes(path: Path) -> bytes:
    """All bytes of a file of the store. Raises OSError, also for what is no regular file (a pipe would be waited for
    without end), a symbolic link, or larger than `MOST_BYTES`."""
    with OpenedFile(path, MOST_BYTES) as opened:
        return opened.read()


def stored_json(path: Path) -> Any:
    """The value in a file of the store. Raises OSError as `stored_bytes`, ValueError as `json_of`."""
    return json_of(stored_bytes(path))


def json_of(text: bytes) -> Any:
    """The value. Raises ValueError for what is no JSON, and for what is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
