"""The time for which threads waited for a core tells a slow program from a machine that is fully used."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from .control_groups import ROOT, groups_of
from .usable_cores import processors_allowed

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def waited_for_core_s(thread: int | None = None) -> float:
    """Seconds that a thread of this process (its native id; None: the calling one) waited for a core since it began
    (proc(5)); 0 where the system does not count."""
    path = _SCHEDSTAT if thread is None else Path(f"/proc/self/task/{thread}/schedstat")
    try:
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def seconds_on_core(run: Callable[[], object]) -> float:
    """Seconds that ``run`` took, less those in which the calling thread waited for a core.

    On a fully used machine a run longer than a time slice would seem slower than it is. Where other threads of this
    process worked during the run, they may have continued it while this thread waited: their time is not subtracted.
    The result is never less than the calling thread's processor time in the run, because part of the measured wait may
    lie before or after the run. Without this bound 7 µs became 0.3 µs, and a batch size that is too small was chosen in
    8 of 100 measurements beside six busy programs.
    """
    waited_s, others_s = waited_for_core_s(), _others_worked_s()
    worked_s, began_s = time.thread_time(), time.perf_counter()
    run()
    took_s, worked_s = time.perf_counter() - began_s, time.thread_time() - worked_s
    waited_s = waited_for_core_s() - waited_s
    lost_s = max(waited_s - (_others_worked_s() - others_s), 0.0)
    return max(took_s - lost_s, worked_s) if lost_s < took_s else took_s


def _others_worked_s() -> float:
    """Processor time of this process without the calling thread's."""
    return time.process_time() - time.thread_time()


def process_waited_for_cores_s() -> float:
    """Seconds that all threads of this process waited for a core, in sum; 0 where Linux does not count them."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited_ns += int(path.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # a thread that has ended
            continue
    return waited_ns / 1e9


class Crowding:
    """Measures what took cores from this process since the object was made, or while it counted: other programs, other
    guests (steal), the quota of the process's group.

    Threads of this process that spin make each other wait as well; only where other programs computed meanwhile is the
    machine crowded. Processes that this program started (trainers) are no other programs. A group that
    used up its quota waits too, with nobody else to blame.
    """

    def __init__(self, at_once: bool = True) -> None:
        """``at_once``: count from now on, and not only in `counted`."""
        self._before = _Seconds()
        self._began = _Seconds.so_far() if at_once else None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the block runs. Pauses, in which no thread waits for a core, would hide what disturbs runs."""
        self._began = _Seconds.so_far()
        try:
            yield
        finally:
            self._before, self._began = self._counted(), None

    def share(self) -> float:
        """The seconds waited, or those of other programs where they are fewer, and those that went to other guests, for
        each second that was counted."""
        return self._counted().share()

    def disturbance(self) -> float:
        """`share`, and the seconds in which the group's quota was used up."""
        counted = self._counted()
        return counted.share() + counted.throttled / max(counted.went_by, 1e-9)

    def _counted(self) -> "_Seconds":
        if self._began is None:
            return self._before
        return self._before.plus(self._began, _Seconds.so_far())


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds in which the clock went by, threads of this process waited for a core, other programs computed, the host
    ran other guests, and the quota was used up."""

    went_by: float = 0.0
    waited: float = 0.0
    others: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0

    @classmethod
    def so_far(cls) -> "_Seconds":
        waited_s, others_s = process_waited_for_cores_s(), _other_programs_worked_s()
        return cls(time.perf_counter(), waited_s, others_s, stolen_s(), throttled_s())

    def plus(self, began: "_Seconds", ended: "_Seconds") -> "_Seconds":
        spans = zip(astuple(self), astuple(began), astuple(ended), strict=True)
        return _Seconds(*(before + end - begin for before, begin, end in spans))

    def share(self) -> float:
        waited = max(min(self.waited - self.throttled, self.others), 0.0)
        return (waited + self.stolen) / max(self.went_by, 1e-9)


def stolen_s(stat: Path = Path("/proc/stat")) -> float:
    """Seconds in which a processor that this process may use wanted to run and the host ran another guest, in sum
    (proc(5)); 0 where Linux does not tell."""
    ours = {f"cpu{number}" for number in processors_allowed()}
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        stolen = sum(int(fields[8]) for fields in lines if fields and fields[0] in ours)
    except (OSError, ValueError, IndexError):
        return 0.0
    return stolen / os.sysconf("SC_CLK_TCK")


def throttled_s(root: Path = ROOT) -> float:
    """Seconds for which the control groups of this process, and those around its own, had used up their quotas; 0 where
    none has one. ``root``: as in `groups_of`."""
    found = 0.0
    for folder in {folder for _, folder in groups_of("cpu", root)}:
        try:
            facts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            found += int(facts.get("throttled_usec", 0)) / 1e6 + int(facts.get("throttled_time", 0)) / 1e9
        except (OSError, ValueError):
            continue
    return found


def _other_programs_worked_s() -> float:
    """Processor time of the whole machine without this program's; 0 where Linux does not tell (proc(5), /proc/stat)."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, *_ = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own_programs_worked_s()


def own_programs_worked_s(root: int | None = None, proc: Path = Path("/proc")) -> float:
    """Processor time of this program: of the process ``root`` (this one), of those that it started, and of those that
    they started, with the ones that have ended."""
    times: dict[int, float] = {}
    parents: dict[int, int] = {}
    for file in proc.glob("[0-9]*/stat"):
        try:  # pid (name) state ppid …: the name may have spaces and brackets
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            times[int(file.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):  # a process that has ended
            continue
    ours, spent = {os.getpid() if root is None else root, os.getpid()}, os.times()
    # These times are exact, unlike the file's.
    times[os.getpid()] = time.process_time() + spent.children_user + spent.children_system
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(times.get(pid, 0.0) for pid in ours)
