"""The server's answer to "is it ready?" and "which models are there?". A fault of one model is that model's: the others
serve, and the server is ready.

The rule: every model that was ready at the start, or was named by ``--require``, is ready. Where the store had models
at the start and none of them could be made ready, the server is not ready until one is. Models that were unloaded by
an order, or deleted from the store, do not count; a required one does, wherever it is.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..batching.interface import IndexEntry
from .traffic.served import ServedModel

MOST_SECONDS = 30.0
# More than `MOST_SECONDS` allows. 2 to the power of 1,024, after nine hours of tries, is no float any more.
_MOST_DOUBLINGS = 10
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
    """The models that could not be made ready: why, and when each is tried again.

    A model is tried again when one of its files changes (it may be in the middle of being copied), and else after 1, 2,
    4 and so on up to 30 seconds; where trying took longer than that, after as long as it took.

    ``models`` is the folder that has one folder for each model, ``clock`` gives seconds. Only the thread that works
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
        pause_s = max(min(2.0 ** min(times, _MOST_DOUBLINGS), MOST_SECONDS), now_s - began_s)
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


NOT_THERE = (
    "it is not in the store: convert it into the store or copy it there, or start without --require for it"
)


class Readiness:
    """``required``: the models that must be ready."""

    def __init__(self, required: Iterable[str] = ()) -> None:
        self._required = tuple(dict.fromkeys(required))
        self._ready_at_start: set[str] = set()
        self._failed_at_start: set[str] = set()

    def started(self, there: Collection[str], ready: Collection[str]) -> None:
        """The models that were in the store at the start have been tried; ``ready`` are served."""
        self._ready_at_start, self._failed_at_start = set(ready), set(there) - set(ready)

    def forget(self, name: str) -> None:
        """The model was deleted from the store."""
        self._ready_at_start.discard(name)
        self._failed_at_start.discard(name)

    def missing(self, ready: Collection[str], unloaded: Collection[str]) -> list[str]:
        """The models for want of which the server is not ready."""
        by_itself = sorted(self._ready_at_start.difference(unloaded))
        missing = [name for name in dict.fromkeys((*self._required, *by_itself)) if name not in ready]
        if missing or ready or self._ready_at_start:
            return missing
        return sorted(self._failed_at_start.difference(unloaded))


def reasons_of(
    missing: Iterable[str],
    faults: Faults,
    unloaded: Collection[str],
    knows: Callable[[str], bool],
    reaches: Callable[[str], bool],
) -> list[str]:
    """The reasons why the missing models are not served, a sentence each. ``knows``: whether the store has the model;
    ``reaches``: whether the reader may know of it."""
    reasons = list[str]()
    for name in missing:
        if not reaches(name):
            continue
        fault = faults.of(name)
        if fault:
            why = f"{fault}; {AGAIN}"
        elif name in unloaded:
            why = f"it was unloaded by an order; POST /v2/repository/models/{name}/load loads it"
        else:
            why = "it is being made ready" if knows(name) else NOT_THERE
        reasons.append(f"model '{name}' is not served: {why}")
    hidden = any(not reaches(name) for name in missing)
    return [*reasons, "a model that this key is not for is not served"] if hidden else reasons


def index_of(
    names: Iterable[str],
    served: Mapping[str, ServedModel],
    loading: Mapping[str, int],
    seen: Mapping[str, tuple[int | None, int]],
    unloaded: Collection[str],
    faults: Faults,
) -> list[IndexEntry]:
    """The entries of all ``names``. ``loading``: the version that is being loaded; ``seen``: the alias's version and
    the newest one, as they were looked at last."""
    found: list[IndexEntry] = []
    for name in names:
        model, being_loaded = served.get(name), loading.get(name)
        loaded = sorted(one.number for one in model.loaded_versions()) if model is not None else []
        found += [(name, str(number), "READY", "") for number in loaded]
        if being_loaded is not None and being_loaded not in loaded:
            found.append((name, str(being_loaded), "LOADING", ""))
        elif model is None:
            live, _ = seen.get(name, (None, 0))
            why = "unloaded" if name in unloaded else faults.of(name) or "not looked at yet"
            found.append((name, "" if live is None else str(live), "UNAVAILABLE", why))
    return found
