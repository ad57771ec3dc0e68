"""One open stream of gRPC, and its answers that the caller has not read yet. Streams wait between their messages
without a limit of time: an idle one ends for a new one.

A stream is a call, and calls are bounded (`Connections` of HTTP does the same for connections): without an end for idle
streams one caller could hold every call.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ...models.errors import BadInput, HalfevenError, Overloaded
from ..http.limits.connections import Connections
from ..http.limits.memory_budget import MemoryBudget
from ..http.limits.request_limits import DEFAULTS
from .call_end import abort

SHARE = 0.75  # of all calls that streams may be: the others are for unary calls
IDLE_SECONDS = 1.0  # without a request under way


def most_streams(calls: int) -> int:
    return max(int(calls * SHARE), 1)


def most_watchers(calls: int) -> int:
    """The number of all calls that may watch the server's health, besides those of `most_streams`: a watching caller
    needs no key, and must not end the stream of a caller that has one. Half of the calls that streams leave; the
    other half is for unary calls."""
    return (calls - most_streams(calls)) // 2


class KeylessCalls:
    """Counts the calls under way that need no key. gRPC cannot end a call whose caller does not take its answer, so
    these are fewer than all calls: a caller without a key cannot hold the places of those who have one."""

    def __init__(self, calls: int) -> None:
        """``calls``: all calls that there may be. Of those that are no streams, every fourth one is kept for keys."""
        self._most, self._count = max((calls - most_streams(calls)) * 3 // 4, 1), 0

    def enter(self, context: Any) -> None:
        """Count the call until gRPC has done with it. Raises Overloaded."""
        if self._count >= self._most:
            raise Overloaded(f"{self._most} calls without a key are under way; ask later, or over HTTP")
        self._count += 1
        context.add_done_callback(self._left)

    def _left(self, _: Any) -> None:
        self._count -= 1


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
        """True if the cancellation that the task has just met is that of `close_idle`: then it is over."""
        if self._closed and self._task is not None:
            self._task.uncancel()
        return self._closed


@asynccontextmanager
async def in_place(streams: Connections, context: Any, instead: str) -> AsyncIterator[OpenStream]:
    """The stream of a call, which holds a place within the block; an error of the block ends the call. ``instead``: the
    unary call that does the same once, for a caller whose stream finds no place."""
    place = OpenStream()
    try:
        if not streams.enter(place):
            raise Overloaded(
                f"as many streams are open as may be, and none of them is idle: use {instead}, or ask later"
            )
        yield place
    except asyncio.CancelledError:
        if not place.was_closed():
            raise
        idle = Overloaded("the stream was idle, and its place was needed for another one: open it again")
        await abort(context, idle)
    except HalfevenError as error:
        if isinstance(error, NotRead):
            await error.writing
        await abort(context, error)
    finally:
        streams.leave(place)


class NotRead(BadInput):
    """The caller did not read an answer in time. Read faster, or ask for less at once.

    ``writing``: the write of that answer, which ends when the caller
    reads on or leaves. grpcio cannot end the stream before."""

    code = "answer_not_read"
    writing: asyncio.Future[None]


class UnreadAnswers:
    """Counts the bytes of one stream's unread answers. `Unsent` does the same for a connection of HTTP."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._bytes, self._closed = budget, 0, False

    def counted(self, answer: Any) -> Any:
        """Count the bytes of an answer until `write` has sent it, and return the answer. After `close` nothing is
        counted."""
        if not self._closed:
            self._take(answer.ByteSize())
        return answer

    async def write(self, context: Any, answer: Any) -> None:
        """Send a counted answer, and wait until the caller has taken it. Raises NotRead after `answer_stall_seconds`
        and the time that the answer takes at `answer_bytes_per_second`."""
        size = answer.ByteSize()
        seconds = DEFAULTS.answer_stall_seconds + size / DEFAULTS.answer_bytes_per_second
        writing = asyncio.ensure_future(context.write(answer))
        try:
            await asyncio.wait((writing,), timeout=seconds)
        except asyncio.CancelledError:
            writing.cancel()
            raise
        if not writing.done():
            error = NotRead(
                f"an answer of {size} bytes was not read within {seconds:.0f} seconds, and the stream ended: read its "
                "answers while its requests are sent"
            )
            error.writing = writing
            raise error
        writing.result()
        self._take(-size)

    def close(self) -> None:
        """Count none of the stream's answers any more: the stream has ended."""
        self._closed = True
        self._take(-self._bytes)

    def _take(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._budget.take_anyway(nbytes)
