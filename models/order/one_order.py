"""One order: a command or a job that makes a version, or guesses one, with every process that it starts.

Its bounds of time and memory protect the machine and decide nothing: what they end has no verdict (`OrderEnded`), and
the message names the bound and its setting. Runs are counted where a count decides (`exporters/guessing/file_runs.py`).
"""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from ..errors import BadFolder, OrderEnded, OutOfMemory, OutOfTime, TooLarge
from ..machine.control_groups import MEMORY_FILES, groups_of, usable_memory
from .lacking_memory import is_out_of_memory, mentions_lacking_memory

SECONDS_SETTING, MEMORY_SETTING, RUNS_SETTING = (
    f"HALFEVEN_CONVERT_{word}" for word in ("SECONDS", "MEMORY_MIB", "RUNS")
)
SHARE = 0.8  # of the memory that this process may have


@dataclass(frozen=True, slots=True)
class OrderBounds:
    """``seconds`` of wall time for all of it; ``memory_bytes`` of private memory for each process, and for all that it
    starts together where a control group can be made (None: `SHARE` of what there is, divided among the orders that run
    ``at_once``); ``runs`` of one bare file."""

    seconds: float = 3600.0
    memory_bytes: int | None = None
    runs: int = 2000
    at_once: int = 1


DEFAULT_BOUNDS = OrderBounds()


class Order:
    """The bounds of an order that has begun now. ``clock``: seconds."""

    def __init__(
        self, bounds: OrderBounds = DEFAULT_BOUNDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bounds = bounds
        self.memory_bytes = bounds.memory_bytes or int(usable_memory() * SHARE) // bounds.at_once
        self._clock, self._end_s = clock, clock() + self.bounds.seconds
        self.group: MemoryGroup | None = None
        self.published = ""  # the version that is in the store already

    @property
    def _so_far(self) -> str:
        if self.published:
            return f"{self.published} was made before that, and is in the store"
        return "There is no verdict, and nothing was published"

    @property
    def left_s(self) -> float:
        return max(self._end_s - self._clock(), 0.0)

    def start(
        self, command: Sequence[str], memory_bytes: int | None = None, **options: Any
    ) -> "subprocess.Popen[bytes]":
        """`subprocess.Popen` within the order's memory, or within ``memory_bytes``."""
        process = cast("subprocess.Popen[bytes]", subprocess.Popen(command, **options))
        bound_child(process.pid, memory_bytes or self.memory_bytes)
        if self.group is not None:
            self.group.add(process.pid)
        return process

    def run(self, command: Sequence[str], what: str) -> tuple[int, str]:
        """The exit status of a child of the order, and what it wrote to standard error. Raises OrderEnded, which names
        ``what``, where a bound ends it."""
        nothing = subprocess.DEVNULL
        with self.start(command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE) as child:
            try:
                said = child.communicate(timeout=self.left_s)[1].decode(errors="replace")
            except subprocess.TimeoutExpired:
                raise self.out_of_time(what) from None
            finally:
                child.kill()
        if child.returncode and (mentions_lacking_memory(said) or self.was_killed_for_memory()):
            raise self.out_of_memory(what)
        return child.returncode, said

    def was_killed_for_memory(self) -> bool:
        """True if the kernel killed one of the order's processes because they had too much memory together."""
        return self.group is not None and self.group.has_killed()

    def out_of_time(self, what: str) -> OutOfTime:
        """``what`` was running at the end of the time."""
        return OutOfTime(
            f"{what} was ended: the order has taken {self.bounds.seconds:g} s, the most that one may take. Raise "
            f"{SECONDS_SETTING}, or give the machine less to do. {self._so_far}"
        )

    def out_of_memory(self, what: str) -> OutOfMemory:
        """``what`` asked for more than there is."""
        return OutOfMemory(
            f"{what} was ended: it needs more than {self.memory_bytes / 2**20:,.0f} MiB of memory, the most of this "
            f"order. Raise {MEMORY_SETTING}, or convert it on a machine with more memory. {self._so_far}"
        )

    @contextmanager
    def bounds_this_process(self, what: str) -> Iterator[None]:
        """This process is bounded by the order's memory too within the block; what it had before counts. Raises
        OutOfMemory, which names ``what``, for an error that says that memory was lacking."""
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        within = self.memory_bytes if soft == resource.RLIM_INFINITY else min(soft, self.memory_bytes)
        with suppress(OSError, ValueError):  # a system other than Linux
            resource.setrlimit(resource.RLIMIT_DATA, (within, hard))
        try:
            yield
        except Exception as error:
            named = isinstance(error, BadFolder | TooLarge | OrderEnded)  # they have a sentence of their own
            if named or not is_out_of_memory(error):
                raise
            raise self.out_of_memory(what) from error
        finally:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    @contextmanager
    def watched(self, end: Callable[[OutOfTime], object]) -> Iterator[None]:
        """``end`` is called at the end of the time in a thread of its own, whatever this one is doing: code of a
        library cannot be interrupted, only its process be ended."""
        timer = threading.Timer(self.left_s, lambda: end(self.out_of_time("the work")))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


_under_way: ContextVar[Order | None] = ContextVar("order", default=None)


@contextmanager
def one_order(bounds: OrderBounds = DEFAULT_BOUNDS) -> Iterator[Order]:
    """All within the block is one order: the one that is under way, else a new one with these bounds."""
    if (outer := _under_way.get()) is not None:
        yield outer
        return
    order = Order(bounds)
    with memory_group(order.memory_bytes) as order.group:
        token = _under_way.set(order)
        try:
            yield order
        finally:
            _under_way.reset(token)


def count_memory(more: int, what: str) -> None:
    """Raises OutOfMemory, which names ``what``, where the order under way has less than ``more`` bytes left: some
    libraries end the process where memory is lacking, so their need is counted beforehand."""
    order = _under_way.get()
    if order is not None and private_bytes() + more > order.memory_bytes:
        raise order.out_of_memory(what)


def private_bytes() -> int:
    """The bytes that RLIMIT_DATA counts in this process; 0 on a system other than Linux."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    return 0


def bound_child(process: int, limit: int) -> None:
    """Make a child process the first that is killed where memory runs out, and limit its private memory to so many
    bytes (0: no limit), from outside, so that none of its code has to. Without effect where the system is not Linux."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text("500")
    with suppress(ProcessLookupError):  # it has ended already
        if not limit:
            return
        _, hard = resource.prlimit(process, resource.RLIMIT_DATA)
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.prlimit(process, resource.RLIMIT_DATA, (lower, lower))


_PREFIX = "halfeven-order-"
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}  # by version
_numbers = count()


class MemoryGroup:
    """A control group of our own, whose limit holds for all processes in it together: the group at ``folder``, in
    control groups of that ``version``.

    Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
    """

    def __init__(self, version: int, folder: Path) -> None:
        self._folder, self._events, self._seen = folder, folder / _EVENTS[version], 0

    def add(self, process: int) -> None:
        """The process and all that it starts from now on are in the group; without effect where it has ended."""
        with suppress(OSError):
            (self._folder / "cgroup.procs").write_text(str(process))

    def has_killed(self) -> bool:
        """True if the kernel has killed a process of the group to keep the limit, since this was asked last."""
        before = self._seen
        with suppress(OSError):
            facts = dict(line.split() for line in self._events.read_text().splitlines())
            self._seen = int(facts.get("oom_kill", 0))
        return self._seen > before


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """A new group inside of this process's, with so many bytes; None where none can be made.

    A group that a killed process left is removed by the next one.
    """
    own: dict[int, Path] = {}
    for version, folder in groups_of("memory"):
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
