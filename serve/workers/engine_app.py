"""In a worker: the engine process's application as an ASGI application here, and what is answered while it is away."""

import asyncio
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from ...models.errors import HalfevenError, Overloaded
from ..http.error_mapping import EngineAway, body_of, headers_of, status_of
from ..http.page_headers import PageHeaders
from .call_frames import (
    BODY,
    LAST_BODY,
    LAST_PIECE,
    PIECE,
    READING,
    REQUEST,
    START,
    read_frame,
    read_start,
    request_frame,
    streams,
    write_body,
    write_frame,
)

AWAY = "the engine process ended and is started again; ask again in a moment"
BROKEN_OFF = "the engine process ended before it answered; ask again"
# What is known here without the engine process: this process answers, and the server is not ready.
_LIVE = {"/healthz": {"status": "ok"}, "/v2/health/live": {"live": True}}
_READY = "/v2/health/ready"


class EngineApp:
    """``calls`` gives the socket over which calls are handed over; None while there is no engine process."""

    def __init__(self, calls: Callable[[], socket.socket | None]) -> None:
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self.ask(scope, receive, send)
        except HalfevenError as error:
            await _answer_here(error, scope, receive, send)

    async def ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the engine process answer. Raises EngineAway, Overloaded where nothing was sent."""
        reader, writer = await streams(self._handed_over())
        call = _Call(scope, receive, send, reader, writer)
        try:
            if not await call.run():
                raise EngineAway(AWAY)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _handed_over(self) -> socket.socket:
        """This end of a new socket, whose other end the engine process has. Raises EngineAway, Overloaded."""
        if (calls := self._calls()) is None:
            raise EngineAway(AWAY)
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # its connections take what descriptors there are
            raise Overloaded("this process has no descriptor left for the request now; try again") from None
        try:
            with theirs:
                socket.send_fds(calls, [b"c"], [theirs.fileno()])
        except BlockingIOError:
            ours.close()
            raise Overloaded("the engine process takes no more requests now; try again") from None
        except OSError:
            ours.close()
            raise EngineAway(AWAY) from None
        return ours


class _Call:
    """One request on its way to the engine process, and its answer on the way back."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._reader, self._writer = reader, writer
        self._may_send = asyncio.Event()
        if not any(name == b"expect" for name, _ in scope["headers"]):
            self._may_send.set()  # else reading the body would tell the caller to send it
        self._left = False

    async def run(self) -> bool:
        """Whether the caller was answered, or has gone. Where an answer breaks off, its connection is closed."""
        await write_frame(self._writer, REQUEST, request_frame(self._scope))
        body = asyncio.get_running_loop().create_task(self._hand_on_body())
        try:
            return await self._hand_back() or self._left
        finally:
            body.cancel()
            with suppress(asyncio.CancelledError):
                await body

    async def _hand_on_body(self) -> None:
        await self._may_send.wait()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                self._left = True
                self._writer.close()  # which is how the engine process learns of it
                return
            more = message.get("more_body", False)
            await write_body(self._writer, BODY, LAST_BODY, message.get("body", b""), more)

    async def _hand_back(self) -> bool:
        started = False
        while (frame := await read_frame(self._reader)) is not None:
            kind, data = frame
            if kind == READING:
                self._may_send.set()
            elif kind == START:
                started = True
                await self._send(read_start(data))
            elif kind in (PIECE, LAST_PIECE):
                await self._send({"type": "http.response.body", "body": data, "more_body": kind == PIECE})
                if kind == LAST_PIECE:
                    return True
        return started


async def _answer_here(error: HalfevenError, scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    reading = scope["method"] in ("GET", "HEAD")
    status, (body, kind), more = status_of(error), body_of(error, path), headers_of(error)
    if reading and path in _LIVE:
        status, body, kind, more = 200, orjson.dumps(_LIVE[path]), "application/json", {}
    elif reading and path == _READY:
        body = orjson.dumps({"ready": False, "reasons": [AWAY], "error": f"not ready: {AWAY}"})

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        head = {"content-type": kind, "content-length": str(len(body)), **more}
        headers = [(name.encode(), value.encode()) for name, value in head.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    await PageHeaders(answer)(scope, receive, send)


class Collected:
    """Calls an application with a whole body, and collects its answer. ``whole``: whether the answer
    has come to its end."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._pieces: list[bytes] = []
        self.status, self.whole = 0, False
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    async def receive(self) -> MutableMapping[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()  # the caller goes on listening
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self._pieces.append(message.get("body", b""))
            self.whole = not message.get("more_body", False)
