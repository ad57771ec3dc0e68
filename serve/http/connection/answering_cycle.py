"""One request through ASGI and its answer, with what the answer says about its connection.

Source: uvicorn's RequestResponseCycle; RFC 9110 10.1.1 (Expect), RFC 2068 19.7.1 (Keep-Alive).
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def kept_header(seconds: int) -> tuple[bytes, bytes]:
    """The header that says how long an idle connection is kept."""
    return b"keep-alive", b"timeout=%d" % seconds


class AnsweringCycle(RequestResponseCycle):
    """uvicorn makes the object; `PoliteProtocol` gives it this class, and ``kept``, the header of an answer after which
    the connection is kept."""

    kept: tuple[bytes, bytes]

    async def send(self, message: Any) -> None:
        if not self.response_started and message["type"] == "http.response.start":
            if self.waiting_for_100_continue and self.more_body:
                # The caller waits to be told to send its body, and is refused: it may send the next request instead,
                # which would be read as the body.
                self.keep_alive = False
            headers = list(message.get("headers", []))
            if self.keep_alive and all(name.lower() != b"connection" for name, _ in headers):
                message = {**message, "headers": [*headers, self.kept]}
        await super().send(message)
