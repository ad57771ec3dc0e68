"""The models that could not be made ready: why, and when each is tried again.

A model is tried again when one of its files changes (it may be in the middle of being copied), and else after 1, 2, 4
and so on up to 30 seconds; where trying took longer than that, after as long as it took.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 30.0
AGAIN = f"it is tried again when one of its files changes, and at least every {MOST_SECONDS:g} s"
_ALIAS = "live"
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True)
class _Fault:
    why: str
    times: int
    stamp: Stamp
    again_s: float


class Faults:
    """``models`` is the folder that has one folder for each model, ``clock`` gives seconds. Only the thread that works
    on a model notes and clears its fault."""

    def __init__(self, models: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._models, self._clock = models, clock
        self._found: dict[str, _Fault] = {}
        self._tries: dict[str, tuple[Stamp, float]] = {}

    def of(self, name: str) -> str | None:
        """The reason why the model could not be made ready the last time; None where it could, or was not tried."""
        fault = self._found.get(name)
        return None if fault is None else fault.why

    def waits(self, name: str) -> bool:
        """True if the model has a fault and is not to be tried again yet."""
        fault = self._found.get(name)
        return (
            fault is not None
            and self._clock() < fault.again_s
            and stamp_of(self._models / name) == fault.stamp
        )

    def trying(self, name: str) -> None:
        """Called before each try: what changes from now on is a reason for another one."""
        self._tries[name] = stamp_of(self._models / name), self._clock()

    def note(self, name: str, why: str) -> bool:
        """Note that the try failed. True if the model had no fault, or another one, before."""
        now_s, before = self._clock(), self._found.get(name)
        stamp, began_s = self._tries.pop(name, None) or (stamp_of(self._models / name), now_s)
        times = 0 if before is None or before.stamp != stamp else before.times + 1
        pause_s = max(min(2.0**times, MOST_SECONDS), now_s - began_s)
        self._found[name] = _Fault(why, times, stamp, now_s + pause_s)
        return before is None or before.why != why

    def clear(self, name: str) -> None:
        self._found.pop(name, None)
        self._tries.pop(name, None)

    def names(self) -> set[str]:
        return set(self._found)


def stamp_of(folder: Path) -> Stamp:
    """The facts of a model's folder that differ once its alias or a file of a version is another one. What servers
    write beside these (events, orders, figures of this device) does not count: trying a model may write there."""
    return tuple(sorted(_facts(folder)))


def _facts(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.isdecimal() or entry.name == _ALIAS]
        versions = {entry.path for entry in entries}  # which may be links, into a store that is only read
    except OSError:
        return
    while entries:
        entry = entries.pop()
        try:
            followed = entry.path in versions
            found = entry.stat(follow_symlinks=followed)
            yield entry.path, found.st_mtime_ns, found.st_ino, found.st_size
            if entry.is_dir(follow_symlinks=followed):
                entries += os.scandir(entry.path)
        except OSError:  # it was moved away meanwhile
            continue
