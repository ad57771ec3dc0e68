"""A control group of our own, where this process may make one: its limit holds for all processes in it together.

Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from ..control_groups import MEMORY_FILES, ROOT, groups_of

_PREFIX = "halfeven-order-"
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}  # by version
_numbers = count()


class MemoryGroup:
    """The group at ``folder``, in control groups of that ``version``."""

    def __init__(self, version: int, folder: Path) -> None:
        self._folder, self._events, self._seen = folder, folder / _EVENTS[version], 0

    def add(self, process: int) -> None:
        """The process and all that it starts from now on are in the group; without effect where it has ended."""
        with suppress(OSError):
            (self._folder / "cgroup.procs").write_text(str(process))

    def has_killed(self) -> bool:
        """Whether the kernel has killed a process of the group to keep the limit, since this was asked last."""
        before = self._seen
        with suppress(OSError):
            facts = dict(line.split() for line in self._events.read_text().splitlines())
            self._seen = int(facts.get("oom_kill", 0))
        return self._seen > before


@contextmanager
def memory_group(limit: int, root: Path = ROOT) -> Iterator[MemoryGroup | None]:
    """A new group inside of this process's, with so many bytes; None where none can be made. ``root``: where ``/`` is.

    A group that a killed process left is removed by the next one.
    """
    own: dict[int, Path] = {}
    for version, folder in groups_of("memory", root):
        # The innermost one: in a group around it the limits of this process's own would not hold.
        own.setdefault(version, folder)
    made = next(filter(None, (_made(version, folder, limit) for version, folder in own.items())), None)
    try:
        yield None if made is None else MemoryGroup(*made)
    finally:
        if made is not None:
            with suppress(OSError):  # a process of the operator's code may still be in it
                made[1].rmdir()


def _made(version: int, own: Path, limit: int) -> tuple[int, Path] | None:
    """The version and folder of a new group inside of ``own``."""
    folder = own / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    try:
        for left in own.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # the kernel removes no group that has a process
                left.rmdir()
        folder.mkdir()
    except OSError:
        return None
    try:
        (folder / MEMORY_FILES[version]).write_text(str(limit))
    except OSError:  # of version 2: the group above hands out no memory
        with suppress(OSError):
            folder.rmdir()
        return None
    return version, folder
