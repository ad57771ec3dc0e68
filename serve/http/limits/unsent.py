"""The bytes of answers on one connection that the caller has not read yet: watched, and counted in the budget."""

import asyncio

from .memory_budget import MemoryBudget
from .request_limits import DEFAULTS

STALL_SECONDS = DEFAULTS.answer_stall_seconds  # between two looks
LEAST_BYTES_PER_SECOND = DEFAULTS.answer_bytes_per_second


class Unsent:
    """Closes the connection of a caller that reads fewer than `LEAST_BYTES_PER_SECOND` over `STALL_SECONDS`."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, budget: MemoryBudget
    ) -> None:
        self._transport, self._loop, self._budget = transport, loop, budget
        self._bytes = 0  # at the last look; counted in the budget
        self._timer: asyncio.TimerHandle | None = None

    @property
    def bytes(self) -> int:
        """The bytes that are in the transport's buffer now."""
        return self._transport.get_write_buffer_size()

    def watch(self) -> None:
        """Begin to watch, where bytes are unsent and no watch is under way."""
        if self._timer is None and (size := self.bytes):
            self._count(size)
            self._timer = self._loop.call_later(STALL_SECONDS, self._look)

    def end(self) -> None:
        """End the watch: all bytes were sent, or the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._count(0)

    def _look(self) -> None:
        size, before = self.bytes, self._bytes
        self._timer = None
        if size and size > before - STALL_SECONDS * LEAST_BYTES_PER_SECOND:
            self._count(0)
            self._transport.abort()
        elif size:
            self._count(size)
            self._timer = self._loop.call_later(STALL_SECONDS, self._look)
        else:
            self._count(0)

    def _count(self, size: int) -> None:
        if size != self._bytes:
            self._budget.take_anyway(size - self._bytes)
            self._bytes = size
