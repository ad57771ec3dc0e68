"""The control groups (cgroups) that hold this process: what a container or a service manager limits.

A limit of a group holds for all groups inside it, so each group from that of the process up to the root is read.
Several hierarchies may be mounted: version 2 (one for all controllers), version 1 (one for each), or both.

Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst, cgroups(7), proc(5) for
``/proc/self/mountinfo``.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MEMORY_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}  # the limit of a group, by version
_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}  # of mountinfo


def groups_of(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """The version (1 or 2) and the folder of each group that holds this process, the innermost first.

    ``controller``: ``cpu`` or ``memory``. ``root``: where ``/`` is (another one in tests). Nothing where the system
    has no such groups or does not show them.
    """
    for version, path in _paths_of(controller, root):
        mounts = list(_mounts_of(controller, version, root))
        around = [(mounted, top) for mounted, top in mounts if _is_around(top, path)]
        for mounted, top in around or mounts:
            yield from ((version, folder) for folder in _upwards(mounted, top, path))


def _paths_of(controller: str, root: Path) -> Iterator[tuple[int, str]]:
    """The version of each hierarchy that may have the controller, and this process's path in it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts_of(controller: str, version: int, root: Path) -> Iterator[tuple[Path, str]]:
    """Each folder where a hierarchy of control groups is mounted, and the path in the hierarchy that is mounted."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        is_it = (
            kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(",")
        )
        if is_it:
            yield root / _unescaped(place[4]).lstrip("/"), _unescaped(place[3])


def _is_around(top: str, path: str) -> bool:
    """True if the group at ``path`` lies inside of the group ``top``, which is mounted."""
    own = PurePosixPath(path)
    return own.is_relative_to(top) and ".." not in own.parts


def _upwards(mounted: Path, top: str, path: str) -> Iterator[Path]:
    """The folders of a group and of those around it, as far as they are mounted.

    In a container the path may lie outside of what is mounted (``/../..``, or a path of the host); then what is mounted
    is the container's own group.
    """
    inside = PurePosixPath(path).relative_to(top).parts if _is_around(top, path) else ()
    for count in range(len(inside), -1, -1):
        yield mounted.joinpath(*inside[:count])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    for escape, sign in _ESCAPES.items():
        text = text.replace(escape, sign)
    return text


def usable_memory(root: Path = ROOT) -> int:
    """Bytes: the machine's memory, or less where a control group of this process says so. ``root``: where ``/`` is."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = (_number_in(folder / MEMORY_FILES[version]) for version, folder in groups_of("memory", root))
    return min([machine, *(limit for limit in groups if limit is not None)])


def free_bytes(root: Path = ROOT) -> int:
    """Bytes that this process may still take: what the machine has available, or less where a control group's limit
    leaves less beside all processes of the group. ``root``: where ``/`` is. Only Linux tells."""
    available = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    words = available.get("MemAvailable", "").split()
    left = [int(words[0]) * 1024] if words else []
    for version, folder in groups_of("memory", root):
        limit, used = _number_in(folder / MEMORY_FILES[version]), _used_in(version, folder)
        left += [] if limit is None or used is None else [max(limit - used, 0)]
    return min(left, default=sys.maxsize)


def _used_in(version: int, folder: Path) -> int | None:
    """Bytes that the processes of a group use, without the pages of files that the system takes back first."""
    usage, reclaimed = {1: ("usage_in_bytes", "total_inactive_file"), 2: ("current", "inactive_file")}[
        version
    ]
    used = _number_in(folder / f"memory.{usage}")
    facts = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    text = facts.get(reclaimed, "").strip()
    return None if used is None else used - (int(text) if text.isdecimal() else 0)


def _number_in(file: Path) -> int | None:
    """The number in the file; None where there is none, or a word (``max``)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
