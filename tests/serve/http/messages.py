"""The messages of ASGI in which a request's body comes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]


def chunk(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def receiving(
    *messages: Message, pause: Callable[[], Awaitable[Any]] | None = None
) -> Callable[[], Awaitable[Message]]:
    """``receive()`` that gives these messages one by one, each after a pause, and then waits for ever."""
    left = list(messages)

    async def receive() -> Message:
        if pause is not None:
            await pause()
        if not left:
            await asyncio.get_running_loop().create_future()
        return left.pop(0)

    return receive
