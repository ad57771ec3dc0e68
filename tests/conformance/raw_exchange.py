"""Bytes sent to a server as they are."""

import socket
from contextlib import suppress

from tests.conformance.conftest import Serving
from tests.patience import PATIENCE_S


def exchange(serving: Serving, sent: bytes) -> bytes:
    """The bytes that come back, perhaps none: a server may hang up on bytes that are no HTTP."""
    host, port = serving.address.split(":")
    received = b""
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as wire,
        suppress(BrokenPipeError, ConnectionResetError),  # it need not read what it refuses
    ):
        with suppress(BrokenPipeError, ConnectionResetError):
            wire.sendall(sent)
        while piece := wire.recv(65536):
            received += piece
    return received
