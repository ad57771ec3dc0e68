"""The time for which threads waited for a core tells a slow program from a machine that is fully used."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .control_groups import ROOT, groups_of
from .usable_cores import processors_allowed, usable_cores

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_STAT = Path("/proc/stat")


def waited_for_core_s(thread: int | None = None) -> float:
    """Seconds that a thread of this process (its native id; None: the calling one) waited for a core since it began
    (proc(5)); 0 where the system does not count."""
    return core_seconds(thread)[1]


def core_seconds(thread: int | None = None) -> tuple[float, float]:
    """Seconds in which a thread of this process (as in `waited_for_core_s`) had a core, and in which it waited for one,
    since it began; 0 and 0 where the system does not count."""
    path = _SCHEDSTAT if thread is None else Path(f"/proc/self/task/{thread}/schedstat")
    try:
        had, waited, *_ = path.read_text().split()
        return int(had) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


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


def waits_of_threads(tasks: Path = Path("/proc/self/task")) -> dict[int, float]:
    """Seconds that each thread of this process, by its native id, waited for a core since it began; empty where Linux
    does not count them."""
    found: dict[int, float] = {}
    for path in tasks.glob("*/schedstat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a thread that has ended
            continue
    return found


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
        self._made_s, self._others_s = time.perf_counter(), _other_programs_worked_s()
        self._cores = usable_cores()
        self._began = _Counters.now() if at_once else None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the block runs. Pauses, in which no thread waits for a core, would hide what disturbs runs.

        The threads that wait in the block must not end in it: their waits end with them. What other programs compute is
        not read here, because that takes a look at every process of the machine: `share` and `disturbance` take their
        mean since the object was made.
        """
        self._began = _Counters.now()
        try:
            yield
        finally:
            self._before, self._began = self._counted(), None

    def share(self) -> float:
        """The part of the counted time that other programs or other guests took from the thread that waited longest."""
        return self._share_of(self._counted())

    def disturbance(self) -> float:
        """`share`, and the part of the time in which the group's quota was used up."""
        counted = self._counted()
        return self._share_of(counted) + self._throttled(counted) / max(counted.went_by, 1e-9)

    def _counted(self) -> "_Seconds":
        if self._began is None:
            return self._before
        return self._before.plus(self._began, _Counters.now())

    def _share_of(self, counted: "_Seconds") -> float:
        of_each_second = (_other_programs_worked_s() - self._others_s) / max(
            time.perf_counter() - self._made_s, 1e-9
        )
        waited = counted.waited - self._throttled(counted)
        waited = max(min(waited, of_each_second * counted.went_by), 0.0)
        return (waited + counted.stolen) / max(counted.went_by, 1e-9)

    def _throttled(self, counted: "_Seconds") -> float:
        """Linux adds the throttled time of all processors up; as many as may be used run at once."""
        return counted.throttled / self._cores


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters at one moment: the clock, the seconds that each thread of this process waited for a core, those in which
    the host ran other guests, and those in which the quota was used up."""

    clock: float
    waits: Mapping[int, float]
    stolen: float
    throttled: float

    @classmethod
    def now(cls) -> "_Counters":
        return cls(time.perf_counter(), waits_of_threads(), stolen_s(), throttled_s())


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds that were counted. ``waited``: of the thread that waited longest; a batch ends with its last thread, and
    of 64 threads that each wait 0.2 % of the time, none disturbs it."""

    went_by: float = 0.0
    waited: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0

    def plus(self, began: _Counters, ended: _Counters) -> "_Seconds":
        """With the time between the two. A thread that has ended meanwhile counts nothing, a new one all it waited."""
        waits = (waited - began.waits.get(thread, 0.0) for thread, waited in ended.waits.items())
        return _Seconds(
            self.went_by + ended.clock - began.clock,
            self.waited + max([0.0, *waits]),
            self.stolen + ended.stolen - began.stolen,
            self.throttled + ended.throttled - began.throttled,
        )


def stolen_s(stat: Path = _STAT) -> float:
    """Seconds in which a processor that this process may use wanted to run and the host ran another guest, in the mean
    of these processors (proc(5)); 0 where Linux does not tell."""
    try:
        stolen = sum(fields[7] for fields in _of_our_processors(stat))
    except IndexError:
        return 0.0
    return stolen / os.sysconf("SC_CLK_TCK") / max(len(processors_allowed()), 1)


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


def _other_programs_worked_s(stat: Path = _STAT) -> float:
    """Processor time, on the processors that this process may use, without this program's; 0 where Linux does not
    tell."""
    found = _of_our_processors(stat)
    if not found:
        return 0.0
    ticks = sum(sum(fields[:3]) + sum(fields[5:7]) for fields in found)  # user, nice, system; irq, softirq
    return ticks / os.sysconf("SC_CLK_TCK") - own_programs_worked_s()


def _of_our_processors(stat: Path) -> list[list[int]]:
    """The counters of the processors that this process may use (proc(5), /proc/stat): a container sees all of the host.
    The sum of all where the file has none of them: some containers have a file of their own, with other numbers."""
    ours = {f"cpu{number}" for number in processors_allowed()}
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
        found = {name: [int(field) for field in fields] for name, *fields in lines}
    except (OSError, ValueError):
        return []
    return [found[name] for name in ours & found.keys()] or [found["cpu"]] * ("cpu" in found)


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
