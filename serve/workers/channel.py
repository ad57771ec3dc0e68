"""Messages between the engine process and one HTTP worker: bytes in shared memory, notice over a socket.

The memory belongs to no file, and the sockets have no name: when both processes are gone, nothing is left. The end of
either process closes its socket, which is how the other one learns of it.

Source: Linux, memfd_create(2), unix(7).
"""

import asyncio
import logging
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence

from .ring import BrokenRing, Buffer, Message, RingReader, RingWriter

RING_BYTES = 4 * 2**20  # of each direction; pages are used from the first one on
_NOTICE = struct.Struct("<QQ")  # how far this process has written, and how far it has read
_PIECE = 256 * _NOTICE.size
_LOG = logging.getLogger("halfeven")


def new_memory() -> int:
    """A descriptor of shared memory for one channel, all zeros."""
    descriptor = os.memfd_create("halfeven", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * RING_BYTES)
    return descriptor


class Channel:
    """One end of a channel, on the running event loop. ``first``: this end writes the first half of the memory.

    ``received`` is called with every message, ``lost`` once when the other process has gone (not after `close`).
    ``descriptor`` is closed; ``wire`` belongs to the channel from now on. ``most``: as `RingReader`. Raises OSError
    where the system has no room for the memory.
    """

    def __init__(
        self,
        wire: socket.socket,
        descriptor: int,
        first: bool,
        most: int,
        received: Callable[[Message], None],
        lost: Callable[[], None],
    ) -> None:
        try:
            self._map = mmap.mmap(descriptor, 2 * RING_BYTES)
        except OSError:
            wire.close()
            raise
        finally:
            os.close(descriptor)
        self._memory = memoryview(self._map)
        halves = self._memory[:RING_BYTES], self._memory[RING_BYTES:]
        self._halves = halves
        self._writer = RingWriter(halves[0 if first else 1])
        self._reader = RingReader(halves[1 if first else 0], most)
        self._received, self._lost = received, lost
        self._loop = asyncio.get_running_loop()
        self._wire = wire
        self._wire.setblocking(False)
        self._half_notice = b""
        self._said_read = 0  # the last count of bytes read that was sent
        self._is_due = self._is_full = self.closed = False
        self._loop.add_reader(wire.fileno(), self._hear)

    def send(self, kind: int, number: int, parts: Sequence[Buffer]) -> None:
        """Send a message, the parts joined; they may not change until the ring had room for them. Without effect where
        the other process has gone."""
        if not self.closed:
            self._writer.put(kind, number, parts)
            self._notify_soon()

    def take_back(self, kind: int, number: int) -> bool:
        """Do not send a message after all; False where at least a part of it is on its way."""
        return not self.closed and self._writer.take_back(kind, number)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._wire.fileno())
        if self._is_full:
            self._loop.remove_writer(self._wire.fileno())
        self._wire.close()
        del self._writer, self._reader
        for part in (*self._halves, self._memory):
            part.release()
        self._map.close()

    def _notify_soon(self) -> None:
        """One notice for all messages of this iteration of the loop."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._is_due = False
        if self.closed:
            return
        try:
            self._wire.send(_NOTICE.pack(self._writer.written, self._reader.read))
        except BlockingIOError:
            if not self._is_full:
                self._is_full = True
                self._loop.add_writer(self._wire.fileno(), self._room_again)
        except OSError:
            self._end()
        else:
            self._said_read = self._reader.read

    def _room_again(self) -> None:
        self._loop.remove_writer(self._wire.fileno())
        self._is_full = False
        self._notify()

    def _hear(self) -> None:
        try:
            data = self._wire.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        data = self._half_notice + data
        whole = len(data) // _NOTICE.size * _NOTICE.size
        self._half_notice = data[whole:]
        if not whole:
            return
        written, read = _NOTICE.unpack_from(data, whole - _NOTICE.size)
        try:
            self._take(written, read)
        except BrokenRing as error:
            _LOG.error("a channel between the engine process and an HTTP worker is closed: %s", error)
            self._end()

    def _take(self, written: int, read: int) -> None:
        self._writer.heard(read)
        if self._writer.waiting:
            before = self._writer.written
            self._writer.go_on()
            if self._writer.written != before:
                self._notify_soon()
        for message in self._reader.messages(written):
            self._received(message)
            if self.closed:
                return
        if self._reader.read - self._said_read > RING_BYTES // 4:  # its writer may wait for room
            self._notify_soon()

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._lost()
