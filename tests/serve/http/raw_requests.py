"""Requests as bytes on a bare socket: clients tidy up what they send."""

import socket
from http.client import HTTPMessage, HTTPResponse

from tests.patience import PATIENCE_S


def message(
    body: bytes, path: str = "/v2/models/double/infer", method: str = "POST", **headers: str
) -> bytes:
    """A request to this machine. The names of headers may have ``_`` for ``-``."""
    fields = {"host": "localhost", "content-length": str(len(body)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def connected(server: str) -> socket.socket:
    """A connection to ``host:port``."""
    host, port = server.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def answer_on(connection: socket.socket) -> tuple[int, HTTPMessage, bytes]:
    """(status, headers, body) of the only answer that is on its way."""
    answer = HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.headers, answer.read()
