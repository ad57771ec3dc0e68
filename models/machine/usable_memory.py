"""The memory that this process may have: the machine's, or less where a control group says so."""

import os
from pathlib import Path

from .control_groups import MEMORY_FILES, ROOT, groups_of


def usable_memory(root: Path = ROOT) -> int:
    """Bytes: the machine's memory, or less where a control group of this process says so. ``root``: where ``/`` is."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = (_limit_in(folder / MEMORY_FILES[version]) for version, folder in groups_of("memory", root))
    return min([machine, *(limit for limit in groups if limit is not None)])


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # else it is "max"
