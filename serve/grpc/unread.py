"""The answers of one stream that its caller has not read yet: counted in the budget, and waited for within limits."""

import asyncio
from typing import Any

from ...models.errors import BadInput
from ..http.limits.memory_budget import MemoryBudget
from ..http.limits.request_limits import DEFAULTS


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
