"""HEAD, answered as GET is but without the body, by the application that answers GET (RFC 9110, 9.3.2)."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Ask ``app`` for the same by GET, and send its answer without the body."""
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:  # the body is dropped
            ended = True
            await send({"type": "http.response.body", "body": b""})

    await app({**scope, "method": "GET"}, receive, send_head)
