"""A caller that leaves, or whose time is up, gives its place in the queue back at once.

The device thread drops such a request when it would be run, which may be a whole batch later. Until then the request
would count in the limits and in the gauge of those that wait. Which of the two threads counts it out is decided under
the queue's lock, that the device thread holds while it forms a batch.
"""

import asyncio
from collections.abc import Sequence

from .admission import Admission
from .interface import Answer
from .request_queue import Request


class WaitingFuture(asyncio.Future[Answer]):
    """The future of an accepted request. ``places``: what it takes in the queue, until it is answered."""

    __slots__ = ("places",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.places: tuple[Admission, Sequence[Request]] | None = None

    def cancel(self, msg: object = None) -> bool:
        self.leave()
        return super().cancel(msg)

    def leave(self) -> None:
        """Nobody waits for the answer any more. What has begun is counted when it ends."""
        places, self.places = self.places, None
        if places is not None and not self.done():
            admission, requests = places
            admission.leave(requests)
