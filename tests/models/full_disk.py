"""A disk that is full."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.versions.traffic.conftest import store as store


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, root: Path, free: Callable[[], bool]) -> None:
    """No file can be made below ``root`` unless something is ``free``."""
    made = tempfile.mkstemp

    def mkstemp(*arguments: Any, **more: Any) -> Any:
        if str(more.get("dir")).startswith(str(root)) and not free():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(more["dir"]))
        return made(*arguments, **more)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
