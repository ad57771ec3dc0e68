"""One ASGI call between two processes, on a socket of its own: the frames that both sides write and read.

A worker hands over every request that it does not answer itself. What the ASGI application in the engine process is
given and sends is written as it is, in frames of a kind, a length and so many bytes; the end of the socket is the end
of the caller, or of the engine process.
"""

import asyncio
import socket
import struct
from typing import Any

import orjson

# From the worker: the request, a piece of its body, the last piece. From the engine process: the body may be sent; the
# answer's head, a piece of its body, the last piece.
REQUEST, BODY, LAST_BODY, READING, START, PIECE, LAST_PIECE = range(1, 8)
_HEAD = struct.Struct("<BI")
MOST = 256 * 1024  # bytes of a frame; a request's head is smaller
_PLAIN = ("method", "path", "http_version", "scheme", "root_path", "client", "server")


async def streams(wire: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The socket belongs to the streams from now on."""
    wire.setblocking(False)
    return await asyncio.open_unix_connection(sock=wire)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """The next frame; None where the other side has gone."""
    try:
        kind, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return (kind, await reader.readexactly(length)) if length <= MOST else None
    except (asyncio.IncompleteReadError, OSError):
        return None


async def write_frame(writer: asyncio.StreamWriter, kind: int, data: bytes = b"") -> None:
    """Without effect where the other side has gone."""
    if writer.is_closing():
        return
    writer.write(_HEAD.pack(kind, len(data)) + data)
    try:
        await writer.drain()
    except OSError:
        writer.close()


async def write_body(
    writer: asyncio.StreamWriter, piece_kind: int, last_kind: int, data: bytes, more: bool
) -> None:
    """Write a piece of a body in frames of at most `MOST` bytes."""
    last = max(len(data) - 1, 0) // MOST * MOST
    for start in range(0, last, MOST):
        await write_frame(writer, piece_kind, data[start : start + MOST])
    await write_frame(writer, piece_kind if more else last_kind, data[last:])


def request_frame(scope: Any) -> bytes:
    """What an application needs of an ASGI scope."""
    said = {key: scope[key] for key in _PLAIN if key in scope}
    said["raw_path"] = (scope.get("raw_path") or b"").decode("latin-1")
    said["query_string"] = scope["query_string"].decode("latin-1")
    said["headers"] = _texts(scope["headers"])
    return orjson.dumps(said)


def read_request(data: bytes) -> dict[str, Any]:
    """The ASGI scope of `request_frame`."""
    said = orjson.loads(data)
    said["raw_path"] = said["raw_path"].encode("latin-1")
    said["query_string"] = said["query_string"].encode("latin-1")
    said["headers"] = _bytes(said["headers"])
    for address in ("client", "server"):
        said[address] = tuple(said[address]) if said.get(address) else None
    return {**said, "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "state": {}}


def start_frame(message: Any) -> bytes:
    return orjson.dumps({"status": message["status"], "headers": _texts(message.get("headers", ()))})


def read_start(data: bytes) -> dict[str, Any]:
    """The ASGI message ``http.response.start``."""
    said = orjson.loads(data)
    return {
        "type": "http.response.start",
        "status": said["status"],
        "headers": _bytes(said["headers"]),
    }


def _texts(headers: Any) -> list[tuple[str, str]]:
    return [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in headers]


def _bytes(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
