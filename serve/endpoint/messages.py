"""Messages between the server and the process of an endpoint: the length of a head, the head as JSON, the body.

Nothing is unpickled: the process has read what callers sent.
"""

import socket
import struct
from typing import Any

import orjson

Head = dict[str, Any]
_LENGTHS = struct.Struct(">IQ")
MOST_BYTES = 2**28  # of a body


def send(connection: socket.socket, head: Head, body: bytes) -> None:
    text = orjson.dumps(head)
    connection.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Head, bytes] | None:
    """The next message; None at the end. Raises ValueError for one that is beyond its bound or was cut off."""
    lengths = _exactly(connection, _LENGTHS.size)
    if not lengths:
        return None
    head, body = _LENGTHS.unpack(lengths)
    if head > 2**20 or body > MOST_BYTES:
        raise ValueError(f"{max(head, body)} bytes: at most {MOST_BYTES} are taken")
    return orjson.loads(_exactly(connection, head)), _exactly(connection, body)


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = connection.recv(min(size - len(found), 2**20))
        if not data and not found:
            return b""
        if not data:
            raise ValueError("the connection ended within a message")
        found += data
    return bytes(found)
