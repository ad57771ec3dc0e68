"""In the engine process: ASGI calls that workers hand over, given to the server's own application."""

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp

from .call_frames import (
    BODY,
    LAST_BODY,
    LAST_PIECE,
    MOST,
    PIECE,
    READING,
    REQUEST,
    START,
    read_frame,
    read_request,
    start_frame,
    streams,
    write_body,
    write_frame,
)

_LOG = logging.getLogger("halfeven")
_PLAIN_FAULT = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]


async def answer_call(app: ASGIApp, wire: socket.socket) -> None:
    """Run the application for the request on this socket, to its end. It is cancelled where the caller has gone, as far
    as the application listens for that."""
    reader, writer = await streams(wire)
    try:
        frame = await read_frame(reader)
        if frame is not None and frame[0] == REQUEST:
            await _Call(reader, writer).run(app, frame[1])
            await _until_read(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _until_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End the answer, and wait until the worker has closed its end. A body that is still being written would meet a
    closed socket, and the worker would lose what it has not read of the answer."""
    with suppress(OSError):
        writer.write_eof()
        while await reader.read(MOST):
            pass


class _Call:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._asked = self._whole = self._started = False

    async def run(self, app: ASGIApp, request: bytes) -> None:
        scope = read_request(request)
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            _LOG.exception("a request to %s failed", scope["path"])
            if not self._started:
                body = b"Internal Server Error"
                head = [*_PLAIN_FAULT, (b"content-length", b"%d" % len(body))]
                await self._send({"type": "http.response.start", "status": 500, "headers": head})
                await self._send({"type": "http.response.body", "body": body})

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._asked:
            self._asked = True
            await write_frame(self._writer, READING)
        frame = await read_frame(self._reader)
        if frame is None or self._whole:
            return {"type": "http.disconnect"}
        kind, data = frame
        self._whole = kind == LAST_BODY
        if kind not in (BODY, LAST_BODY):
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": data, "more_body": kind == BODY}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            await write_frame(self._writer, START, start_frame(message))
        elif message["type"] == "http.response.body":
            more = message.get("more_body", False)
            await write_body(self._writer, PIECE, LAST_PIECE, bytes(message.get("body", b"")), more)
