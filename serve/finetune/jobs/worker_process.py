"""A child process of a job: it reports lines of JSON, which are read until it ends, the job is cancelled or paused, or
the server stops; it reads its stdin, and never outlives the server. The exceptions that end a job."""

import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ....models.files.durable import replace_text
from ....models.machine.usable_cores import prepare_libraries
from ....models.order.lacking_memory import exit_words
from ....models.order.one_order import bound_child
from .records.job_store import JobStore

MAX_LINE = 2**26  # the rows that are left out are named one by one; with a longer one the process is killed
_LAST_BYTES = 1000  # of what a process wrote, in messages
_LOOK_EVERY_MS = 100  # whether the process has ended
_NICE = 10  # of a child of low priority, added to the server's

Priority = Literal["normal", "low", "idle"]
"""The share of the processor that a child process has beside the server. ``normal``: equally. ``low``: about a
tenth of a core where both want all of it. ``idle``: what the server leaves (``SCHED_IDLE``, sched(7); elsewhere the
greatest niceness)."""


class JobFailed(Exception):
    """The job failed, with reason code and message. ``version``: the number of the version that was made
    nevertheless."""

    def __init__(self, code: str, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.code, self.version = code, version


class StaleParent(JobFailed):
    """Another version became active since: what this one replaces is not what it was made from and measured against."""


class WorkerLost(JobFailed):
    """A process of the job ended without a result: it was killed, or ran out of memory."""


class Cancelled(Exception):
    """The caller cancelled the job."""


class Paused(Exception):
    """The caller paused the job; what it has done so far is in its folder."""


class ServerStops(Exception):
    """The server is shutting down; the job is settled by the next one."""


class Child:
    """Use it in a ``with`` block: when the block is left, the process and all that it started are killed.
    ``priority``: of its processor time, else ``normal``; ``memory_bytes``: of its private memory (0: no limit).
    `of_module` takes both from the request."""

    def __init__(
        self, command: list[str], log: Path, priority: Priority = "normal", memory_bytes: int = 0
    ) -> None:
        self._log = log
        self._started = time.monotonic()
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        # The hash seed: the order of a set must not differ from run to run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        prepare_libraries(environment)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                process_group=0,  # no new session: Linux divides processor time among sessions whatever their niceness
                env=environment,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="halfeven-child-lines", daemon=True)
        try:
            # The priority is lowered before the process has begun: its imports alone take seconds of a core.
            with suppress(OSError):
                _lower(self._process.pid, priority)
            bound_child(self._process.pid, memory_bytes)
            self._reader.start()
        except BaseException:  # no block is entered that could be left
            self.__exit__()
            raise

    @classmethod
    def of_module(cls, module: str, request: Mapping[str, Any], place: Path) -> "Child":
        """``python -PB -m module REQUEST.json``: no byte code is written beside the operator's code, which may be a
        version's."""
        command = [sys.executable, "-PB", "-m", module, _written(request, place)]
        priority, memory_bytes = request.get("priority", "normal"), request.get("memory_limit_bytes", 0)
        return cls(command, place.with_suffix(".log"), priority, memory_bytes)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._process.wait()
        if self._reader.ident is not None:  # it was started
            self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # a line that it never read may still be in the buffer
                    pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        """The seconds since the process was started."""
        return time.monotonic() - self._started

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def lines(self, every_s: float) -> Iterator[Mapping[str, Any] | None]:
        """Every reported line until the process ends; None at least every ``every_s`` seconds, for other checks."""
        while True:
            try:
                line = self._lines.get(timeout=every_s)
            except queue.Empty:
                yield None
                continue
            if line is None:
                break
            yield json.loads(line)
        while True:
            try:
                self._process.wait(every_s)
                return
            except subprocess.TimeoutExpired:
                yield None

    def notify(self, word: str) -> None:
        """Write one line to its stdin; without effect where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return

    def last_output(self) -> str:
        """The tail of what it wrote to stderr."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = log.read(_LAST_BYTES).decode(errors="replace").strip()
        return text or "(none)"

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        """Whole lines, until the process has ended: what it has forked may hold the pipe open for longer."""
        assert self._process.stdout is not None
        pipe, poll, pending = self._process.stdout.fileno(), select.poll(), bytearray()
        poll.register(pipe, select.POLLIN)
        while len(pending) <= MAX_LINE:
            ended = self._process.poll() is not None  # whatever it wrote is in the pipe by then
            if not poll.poll(_LOOK_EVERY_MS):
                if ended:
                    break
                continue
            if not (data := os.read(pipe, 1 << 16)):
                break
            pending += data
            if b"\n" in data:
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                for line in filter(bytes.strip, lines):
                    self._lines.put(line)
        else:
            self._kill()
        self._lines.put(None)


def _lower(process: int, priority: Priority) -> None:
    if priority == "idle" and sys.platform == "linux":
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    elif priority != "normal":
        steps = _NICE if priority == "low" else 19
        os.setpriority(os.PRIO_PROCESS, process, min(os.getpriority(os.PRIO_PROCESS, process) + steps, 19))


def _written(request: Mapping[str, Any], place: Path) -> str:
    path = place.with_suffix(".json")
    replace_text(path, json.dumps(request))
    return str(path)


LOOK_EVERY_S = 0.05  # at the job's row: a small net makes a thousand steps a second, each with a line
CANCEL_SECONDS = 10.0  # for the step that is being made
PAUSE_SECONDS = 30.0  # for that step and a checkpoint


def lines_of(
    child: Child, id: str, job_store: JobStore, stopping: threading.Event, pauses: bool = False
) -> Iterator[Mapping[str, Any]]:
    """The lines that a child reports; cancelling, pausing and shutting down are handled between them.

    ``pauses``: the child has a checkpoint to write first. Raises Cancelled, Paused, ServerStops.
    """
    until: dict[str, float] = {}  # by the word that was sent: when its answer is waited for no longer
    looked = -math.inf
    with child:
        for line in child.lines(every_s=0.1):
            if stopping.is_set():
                raise ServerStops
            if line is not None and time.monotonic() - looked < LOOK_EVERY_S:
                yield line
                continue
            job, looked = job_store.job(id), time.monotonic()
            if job.pause_requested and not pauses:
                raise Paused
            for word, asked, seconds in (
                ("cancel", job.cancel_requested, CANCEL_SECONDS),
                ("pause", job.pause_requested, PAUSE_SECONDS),
            ):
                if asked and word not in until:
                    until[word] = time.monotonic() + seconds
                    child.notify(word)
            if time.monotonic() > until.get("cancel", math.inf):
                raise Cancelled
            if time.monotonic() > until.get("pause", math.inf):
                raise Paused
            if line is not None:
                yield line


def result_of(child: Child, last: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The last line of a child that did its work. Raises JobFailed (WorkerLost), Cancelled or Paused otherwise."""
    if not last:
        raise WorkerLost(
            "WORKER_LOST",
            f"the {what} ended without a result ({exit_words(child.exit_status)}); what serves is unchanged. "
            f"Its last output: {child.last_output()}",
        )
    if last["type"] == "cancelled":
        raise Cancelled
    if last["type"] == "paused":
        raise Paused
    if last["type"] == "failed":
        trace = f"\n{last['traceback'].rstrip()}" if last.get("traceback") else ""
        raise JobFailed(last["code"], last["message"] + trace)
    return last
