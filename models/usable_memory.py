"""The memory that this process may have: the machine's, or less where a control group says so."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_FILES = ("memory.max", "memory/memory.limit_in_bytes")  # version 2 and 1


def usable_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: the machine's memory, or less where the control group of this process says so."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit in map(_limit_in, _files(cgroups)) if limit is not None)])


def _files(cgroups: Path) -> Iterator[Path]:
    """The limits of the group of this process and those around it. Source: cgroups(7), proc(5)."""
    try:
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[-1].split("\n", 1)[0].strip("/")
    except OSError:
        own = ""
    for name in _CGROUP_FILES:
        yield cgroups / name
    group = cgroups / own
    while group != cgroups and cgroups in group.parents:
        yield group / _CGROUP_FILES[0]
        group = group.parent


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # else it is "max"
