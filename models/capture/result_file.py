"""``result.json``, by which the child says what it found. Imports no torch."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.durable import no_space_left

_PROBE = 1 << 21  # bytes, more than a result has
_NAME = "result.json"


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    """Write the result; it is there whole or not at all. Raises OSError."""
    draft = out / f"{_NAME}.draft"
    draft.write_text(json.dumps(result))
    draft.replace(out / _NAME)


def read_result(out: Path) -> dict[str, Any]:
    """The child's result; empty where it wrote none. Raises OSError where the disk is full."""
    try:
        result = json.loads((out / _NAME).read_text())
    except (OSError, ValueError):
        result = {}
    if full := result.get("disk_full") or (not result and _is_full(out) and str(out)):
        raise disk_full(full)
    return result


def disk_full(place: str) -> OSError:
    """The system's error for a disk that is full, which names the file or folder ``place`` on it."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


def _is_full(folder: Path) -> bool:
    try:
        (folder / "probe").write_bytes(bytes(_PROBE))
    except OSError as error:
        return no_space_left(error)
    return False
