"""The number of cores that this process may use, as its affinity and the processor quota of its control groups allow.

Every number of threads or processes that follows the machine is taken from here. Libraries that count the cores by
themselves know the affinity and not the quota: with four threads under a quota of one core, all four are stopped for
most of each period of the scheduler, and a batch waits for the last of them. Imports nothing heavy: it is called before
torch and numpy start their threads.
"""

import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from .control_groups import ROOT, groups_of
from .library_variables import bindings, take_out, warn_once

_OF_LIBRARIES = "OMP_NUM_THREADS"  # OpenMP, MKL, OpenBLAS and Arrow read it when they are loaded


@dataclass(frozen=True, slots=True)
class Cores:
    """``affinity``: the cores on which this process may run (None: the system does not tell). ``quota``: the time that
    the tightest control group gives the process, in cores (None: no limit)."""

    online: int
    affinity: int | None
    quota: float | None

    @property
    def usable(self) -> int:
        """The number of cores that may be used; a part of a core counts as a core."""
        allowed = self.affinity or self.online
        return allowed if self.quota is None else max(1, min(allowed, math.ceil(self.quota)))

    def __str__(self) -> str:
        usable = f"{self.usable} core{'s' if self.usable > 1 else ''}"
        if self.usable == self.online and self.quota is None:
            return usable
        limits = [f"{self.online} online"]
        limits += [] if self.affinity is None else [f"affinity {self.affinity}"]
        limits += [] if self.quota is None else [f"cgroup quota {self.quota:g}"]
        return f"{usable} ({', '.join(limits)})"


def usable_cores() -> int:
    """The number of cores that this process may use, at least 1."""
    return cores_here().usable


def cores_here(root: Path = ROOT) -> Cores:
    """``root``: where ``/`` is (another one in tests)."""
    cores = Cores(os.cpu_count() or 1, len(processors_allowed()) or None, quota_in(root))
    if cores.affinity == 1 < cores.online and (settings := bindings()):
        warn_once(
            f"this process may use 1 of {cores.online} processors, and {', '.join(settings)} lets OpenMP bind it to "
            "one when torch is imported; to use the others, unset that before the process starts"
        )
    return cores


def processors_allowed() -> set[int]:
    """The numbers of the processors on which this process may run; empty where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    return affinity(0) if affinity else set()


def quota_in(root: Path = ROOT) -> float | None:
    """The smallest quota of the control groups that hold this process, in cores; None where none of them has one."""
    read = {1: _quota_of_version_1, 2: _quota_of_version_2}
    found = (read[version](folder) for version, folder in groups_of("cpu", root))
    return min((quota for quota in found if quota is not None), default=None)


def prepare_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit the threads of libraries in this process and its children to a quota, which they do not see by themselves,
    and take out the variables that `library_variables` names.

    A number that the user has set stays. Every process of ours is prepared by this, before numpy and torch are
    imported: the command line for itself and its children, and a program of the user's for the children that it starts.
    """
    take_out(environment)
    cores = cores_here()
    if cores.quota is not None and cores.usable < (cores.affinity or cores.online):
        environment.setdefault(_OF_LIBRARIES, str(cores.usable))


def threads_of_libraries() -> int:
    """The number of threads that libraries have in this process: as the user has set it, or one for each core."""
    first = os.environ.get(_OF_LIBRARIES, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else usable_cores()


def _quota_of_version_1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return _in_cores(quota, int((folder / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None


def _quota_of_version_2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else _in_cores(int(quota), int(period))
    except (OSError, ValueError):
        return None


def _in_cores(quota: int, period: int) -> float | None:
    """-1 stands for no limit (version 1)."""
    return quota / period if quota > 0 and period > 0 else None
