"""How long threads waited for a core: it tells a slow program from a machine that is fully used."""

import os
import time
from collections.abc import Callable
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def waited_for_core_s() -> float:
    """Seconds that the calling thread waited for a core since it began (proc(5)); 0 where the system does not count."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
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
    """Whether other programs took cores that this process wanted, since this was made.

    Threads of this process that spin make each other wait as well; only where other programs computed meanwhile is the
    machine crowded.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._waited_s, self._others_s = process_waited_for_cores_s(), _other_programs_worked_s()

    def share(self) -> float:
        """The seconds waited, or those of other programs where they are fewer, for each second that went by."""
        waited_s = process_waited_for_cores_s() - self._waited_s
        others_s = _other_programs_worked_s() - self._others_s
        return min(waited_s, others_s) / max(time.perf_counter() - self._began_s, 1e-9)


def _other_programs_worked_s() -> float:
    """Processor time of the whole machine without this process's; 0 where Linux does not tell (proc(5), /proc/stat)."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()
