"""One open stream of gRPC. Streams wait between their messages without a limit of time: an idle one ends for a new one.

A stream is a call, and calls are bounded (`Connections` of HTTP does the same for connections): without an end for idle
streams one caller could hold every call.
"""

import asyncio
import time
from collections.abc import Callable

from ...models.errors import Overloaded

SHARE = 0.75  # of all calls that streams may be: the others are for unary calls
IDLE_SECONDS = 1.0  # without a request under way


def most_streams(calls: int) -> int:
    return max(int(calls * SHARE), 1)


def most_watchers(calls: int) -> int:
    """How many of all calls may watch the server's health, besides those of `most_streams`: a watching caller needs no
    key, and must not end the stream of a caller that has one. Half of the calls that streams leave; the other half
    is for unary calls."""
    return (calls - most_streams(calls)) // 2


class OpenStream:
    """Made in the task that answers the stream, which `close_idle` cancels. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._task, self._clock = asyncio.current_task(), clock
        self._under_way = 0
        self._since_s = clock()
        self._closed = False

    def asked(self) -> None:
        """A request came."""
        self._under_way += 1

    def answered(self) -> None:
        """The oldest answer was taken by the caller."""
        self._under_way -= 1
        self._since_s = self._clock()

    def is_idle(self) -> bool:
        return not self._under_way and self._clock() - self._since_s >= IDLE_SECONDS

    def close_idle(self) -> None:
        if self._task is not None:
            self._closed = True
            self._task.cancel()

    def was_closed(self) -> bool:
        """Whether the cancellation that the task has just met is that of `close_idle`: then it is over."""
        if self._closed and self._task is not None:
            self._task.uncancel()
        return self._closed


def ended() -> Overloaded:
    return Overloaded("the stream was idle, and its place was needed for another one: open it again")


def no_place(instead: str) -> Overloaded:
    """The error for a caller whose stream finds no place. ``instead``: the unary call that does the same once."""
    return Overloaded(
        f"as many streams are open as may be, and none of them is idle: use {instead}, or ask later"
    )
