"""A timer for arrivals: event loops round their own up to whole milliseconds, which at 5,000 arrivals a
second would make bunches of five. Linux' timerfd wakes within some tens of microseconds.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable

from ...models.errors import BadSetting

_MONOTONIC, _NONBLOCK = 1, os.O_NONBLOCK | os.O_CLOEXEC
_SOONEST_NS = 1_000  # zero would disarm it


class _Times(ctypes.Structure):
    """``struct itimerspec``: no repetition, then the time until it rings."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns"))


class Alarm:
    """Calls ``ring`` on this event loop once after each ``set``. Close it."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """Raises BadSetting where the system has no such timer."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timerfd_create"):
            raise BadSetting("--rate needs Linux: this system cannot time single requests; use --concurrency")
        self._handle: int = self._libc.timerfd_create(_MONOTONIC, _NONBLOCK)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._woken)

    def set(self, seconds: float) -> None:
        """Ring once after ``seconds``; replaces a time that was set before."""
        after_s, after_ns = divmod(max(int(seconds * 1e9), _SOONEST_NS), 10**9)
        self._libc.timerfd_settime(self._handle, 0, ctypes.byref(_Times(0, 0, after_s, after_ns)), None)

    def close(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)

    def _woken(self) -> None:
        try:
            os.read(self._handle, 8)
        except BlockingIOError:  # it was set anew in between
            return
        self._ring()
