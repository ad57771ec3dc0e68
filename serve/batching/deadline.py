"""Timeouts that fire while a request waits, also while the device is busy: a timer for each that asked for one."""

import asyncio

from ...models.errors import TimedOut
from .leaving import WaitingFuture
from .request_queue import Request


def expire_after(
    timeout_ns: int, request: Request, future: WaitingFuture, loop: asyncio.AbstractEventLoop, model: str
) -> None:
    """Answer with TimedOut when the time is up and the request's batch has not begun. On the event loop.

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
