"""What the parent process and its children send each other: one JSON object a packet, with descriptors beside it.

The parent sends ``connect`` (with the three descriptors of a channel), ``leave``, ``hurry`` and ``end``; a child sends
``up`` when it works, ``alone`` when it needs a channel, and ``failed`` where it cannot start.
"""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import orjson

_MOST = 64 * 1024  # bytes of a packet
_DESCRIPTORS = 3  # that a ``connect`` brings
Said = dict[str, Any]


def send_packet(wire: socket.socket, said: Said, descriptors: Sequence[int] = ()) -> bool:
    """Whether it was sent: False where the other process has gone, or does not read."""
    try:
        socket.send_fds(wire, [orjson.dumps(said)], list(descriptors))
    except OSError:
        return False
    return True


def read_packet(wire: socket.socket) -> tuple[Said, list[int]] | None:
    """The next packet; None where the other process has gone. Raises BlockingIOError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(wire, _MOST, _DESCRIPTORS)
    except BlockingIOError:
        raise
    except OSError:
        return None
    return (orjson.loads(data), descriptors) if data else None


class Control:
    """A child's end, on its event loop. Where the parent has gone, the child ends at once."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        wire.setblocking(False)

    def send(self, **said: Any) -> None:
        send_packet(self._wire, said)

    def listen(self, hear: Callable[[Said, list[int]], None]) -> None:
        def on_readable() -> None:
            with suppress(BlockingIOError):
                if (packet := read_packet(self._wire)) is None:
                    os._exit(1)
                hear(*packet)

        asyncio.get_running_loop().add_reader(self._wire.fileno(), on_readable)


def connection_of(descriptors: Sequence[int]) -> tuple[socket.socket, socket.socket, int]:
    """The notice socket, the socket for calls and the memory of a ``connect``.

    Raises OSError where this process had no room for all of them: then those that came are closed.
    """
    if len(descriptors) != _DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    wire, calls, memory = descriptors
    return socket.socket(fileno=wire), socket.socket(fileno=calls), memory


@contextmanager
def signals_ignored() -> Generator[None, None, None]:
    """A child ends when its parent says so: Ctrl-C and a service manager signal all processes of a server at once."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
