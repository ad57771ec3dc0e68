"""A process ends with the process that started it, even while it is busy, and reports to it. Needs the standard library
alone."""

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def die_with_the_parent(control: int) -> None:
    """From now on the kernel kills this process when the thread that started it ends (Linux; elsewhere nothing is set).

    ``control``: the pipe whose other end only the parent has. Where that is closed already, the parent died before the
    kernel was asked, and this process ends here.
    """
    _ask_the_kernel()
    poll = select.poll()
    poll.register(control, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os._exit(1)


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends. ``parent``: the parent's process number; this process
    ends here if it has another parent by now. `die_with_the_parent` is for a process that has a pipe from its parent
    instead of the number."""
    _ask_the_kernel()
    if os.getppid() != parent:
        os._exit(1)


def reporting(request_file: str) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], None]]:
    """The request of a process that reports lines of JSON on its standard output and whose standard input is a pipe
    from its parent, with which it ends; and what reports a line. Whatever else prints does so to standard error."""
    die_with_the_parent(sys.stdin.fileno())
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(line: Mapping[str, Any]) -> None:
        lines.write(json.dumps(line) + "\n")
        lines.flush()

    return json.loads(Path(request_file).read_text()), report


def _ask_the_kernel() -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
