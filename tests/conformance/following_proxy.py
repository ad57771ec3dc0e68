"""A small HTTP/1.1 proxy that follows readiness, as a Kubernetes Service or a load balancer does.

It asks every server for its readiness, sends requests to those that are ready over kept connections, and repeats
nothing: a request that a server does not answer is lost, and counted.
"""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.patience import PATIENCE_S

LOOK_EVERY_S = 0.05
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\nconnection: *([^\r]+)", re.IGNORECASE)
_READY = b"GET /v2/health/ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FollowingProxy:
    """``lost`` has a line for every request that was sent to a server and not answered."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.sent: dict[str, int] = {}  # by server
        self.port = 0
        self._kept: dict[str, list[Streams]] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._ready: list[str] = []
        self._changed = asyncio.Condition()
        self._turn = 0

    def add(self, server: str) -> None:
        self._kept[server] = []

    def remove(self, server: str) -> None:
        """Forget a server that has ended."""
        del self._kept[server]

    def is_ready(self, server: str) -> bool:
        return server in self._ready

    async def run(self, up: threading.Event, end: asyncio.Event) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        up.set()
        while not end.is_set():
            ready = [one for one in list(self._kept) if await self._asks(one)]
            async with self._changed:
                self._ready = ready
                self._changed.notify_all()
            await asyncio.sleep(LOOK_EVERY_S)
        server.close()
        for writer in list(self._open):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _asks(self, server: str) -> bool:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await self._opened(server)
            try:
                writer.write(_READY)
                return b" 200 " in await reader.readline()
            finally:
                self._close(writer)
        return False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await _message(reader)
                writer.write(_CONNECTION.sub(b"", await self._answer(request)))
                await writer.drain()
        self._close(writer)

    async def _answer(self, request: bytes) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready)
        self._turn += 1
        server = self._ready[self._turn % len(self._ready)]
        reader, writer = await self._connection(server)
        self.sent[server] = self.sent.get(server, 0) + 1
        try:
            writer.write(request)
            answer = await _message(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.lost.append(f"{server}: {error!r}")
            self._close(writer)
            return b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"
        connection = _CONNECTION.search(answer.partition(b"\r\n\r\n")[0])
        if (connection and connection[1] == b"close") or server not in self._kept:
            self._close(writer)
        else:
            self._kept[server].append((reader, writer))
        return answer

    async def _connection(self, server: str) -> Streams:
        kept = self._kept[server]
        while kept:
            reader, writer = kept.pop()
            if not reader.at_eof():
                return reader, writer
            self._close(writer)
        return await self._opened(server)

    async def _opened(self, server: str) -> Streams:
        reader, writer = await asyncio.open_connection(*server.split(":"))
        self._open.add(writer)
        return reader, writer

    def _close(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")


@contextmanager
def following() -> Iterator[FollowingProxy]:
    """A proxy that runs in a thread."""
    up, loop = threading.Event(), asyncio.new_event_loop()
    proxy, end = FollowingProxy(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy.run(up, end)))
    thread.start()
    try:
        assert up.wait(PATIENCE_S)
        yield proxy
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(PATIENCE_S)
        loop.run_until_complete(asyncio.sleep(0.1))  # the last closed connections are taken down
        loop.close()
