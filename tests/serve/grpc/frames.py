"""HTTP/2 frames by hand, for what no client of gRPC sends. Source: RFC 9113, RFC 7541."""

import socket
import struct
from collections.abc import Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_HEADERS, END_STREAM, ACK = 4, 1, 1
CANCEL = struct.pack("!I", 8)


def _literal(name: str, value: str) -> bytes:
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def head_of(call: str, **more: str) -> bytes:
    """The block of the headers of a call."""
    fields = {":method": "POST", ":scheme": "http", ":path": call, ":authority": "localhost"}
    return b"".join(
        _literal(*one)
        for one in {**fields, "content-type": "application/grpc", "te": "trailers", **more}.items()
    )


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


# The settings of a caller that takes no byte of an answer: SETTINGS_INITIAL_WINDOW_SIZE (4) is 0.
NO_WINDOW = frame(SETTINGS, payload=struct.pack("!HI", 4, 0))


class Connection:
    """A connection to ``address``, ``host:port``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 20)
        self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(SETTINGS))

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def read(self) -> Iterator[tuple[int, int, bytes]]:
        """Kind, flags and payload of each frame, until the server closes."""
        with self._socket.makefile("rb") as file:
            while len(start := file.read(9)) == 9:
                yield start[3], start[4], file.read(int.from_bytes(start[:3], "big"))

    def close(self) -> None:
        self._socket.close()
