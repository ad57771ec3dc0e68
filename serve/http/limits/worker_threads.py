"""A few threads for work that would hold up the event loop: reading large, compressed or picture bodies.

They are few, so that callers with such bodies leave most of the processor to the others.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ....models.errors import Overloaded
from ....models.machine.usable_cores import usable_cores
from .request_limits import DEFAULTS

T = TypeVar("T")
MOST_WAITING = DEFAULTS.bodies_waiting  # in memory
_NICE = 15  # behind the compute threads too (`batching/device.py`: 5): their callers sent small bodies


class WorkerThreads:
    """``threads``: by default half the usable cores, two where there are two. They are `_NICE` steps of niceness behind
    the event loop."""

    def __init__(self, threads: int | None = None, most_waiting: int = MOST_WAITING) -> None:
        self._threads = threads or min(usable_cores(), max(2, usable_cores() // 2))
        self._pool = ThreadPoolExecutor(self._threads, "halfeven-predict", _stand_behind)
        self._most, self._waiting = self._threads + most_waiting, 0

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """The work's result, from a thread. Raises Overloaded where `MOST_WAITING` bodies wait already."""
        if self._waiting >= self._most:
            raise Overloaded(
                f"{self._waiting} requests with pictures or with large or compressed bodies wait to be read; try again"
            )
        self._waiting += 1
        try:
            done = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
            done.add_done_callback(self._one_less)  # also where the caller has gone: the thread still works
        except BaseException:
            self._waiting -= 1
            raise
        try:
            return await asyncio.shield(done)
        finally:
            # The traceback of a failure refers to this frame. Did this refer to the failure, what the thread held would
            # stay until the collector runs: measured, 1.2 GB of refused bodies.
            del done

    def _one_less(self, done: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            done.exception()  # read it, else asyncio warns where the caller has gone


def _stand_behind() -> None:
    if sys.platform == "linux":  # where niceness is a thread's own, setpriority(2)
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + _NICE, 19))
