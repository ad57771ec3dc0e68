"""A caller that leaves, or whose time is up, gives its place in the queue back at once.

The device thread drops such a request when it would be run, which may be a whole batch later. Until then the request
would count in the limits and in the gauge of those that wait. Which of the two threads counts it out is decided under
the queue's lock, that the device thread holds while it forms a batch.
"""

import asyncio
from collections.abc import Sequence

from ...models.errors import TimedOut
from .admission import Admission
from .interface import Answer
from .request_queue import Request


class WaitingFuture(asyncio.Future[Answer]):
    """The future of an accepted request. ``places``: what it takes in the queue, until it is answered; to be set at
    once (a constructor of its own would cost each request 0.2 µs)."""

    __slots__ = ("places",)
    places: tuple[Admission, Sequence[Request]] | None

    def cancel(self, msg: object = None) -> bool:
        self.leave()
        return super().cancel(msg)

    def leave(self) -> None:
        """Nobody waits for the answer any more. What has begun is counted when it ends."""
        places, self.places = self.places, None
        if places is not None and not self.done():
            admission, requests = places
            admission.leave(requests)


def expire_after(
    timeout_ns: int, request: Request, future: WaitingFuture, loop: asyncio.AbstractEventLoop, model: str
) -> None:
    """Answer with TimedOut when the time is up and the request's batch has not begun, also while the device is busy. On
    the event loop.

    The device thread drops such a request without running it. A request whose batch has begun gets its answer.
    """
    handle = loop.call_later(timeout_ns / 1e9, _expire, request, future, timeout_ns, model)
    future.add_done_callback(lambda _: handle.cancel())


def _expire(request: Request, future: WaitingFuture, timeout_ns: int, model: str) -> None:
    if request.began or future.done():
        return
    future.leave()
    future.set_exception(
        TimedOut(
            f"Request timeout expired: model '{model}' could not begin with it within {timeout_ns / 1e6:g} ms; "
            "allow more time, or ask again when fewer requests wait"
        )
    )
