"""Strangers of one kind, as many connections as are asked for, until the process is ended.

    python -m tests.benchmarks.stranger_kinds KIND PORT CONNECTIONS MODEL

Says ``ready`` when each connection was opened once. Nothing large is imported: the load is to be theirs alone.
"""

import asyncio
import gzip
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

MODEL = sys.argv[4] if __name__ == "__main__" else ""
INFER = f"/v2/models/{MODEL}/infer"

Stranger = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def head(path: str = INFER, **headers: str | int) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}".encode()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def drip(writer: asyncio.StreamWriter, data: bytes, every_s: float = 1.0) -> None:
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        await writer.drain()
        await asyncio.sleep(every_s)


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(writer, head(x_note="x" * 600))


async def endless_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head() + b"x-note: ")
    while True:
        writer.write(b"x" * 8192)
        await writer.drain()


async def slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(Content_Length=2**20) + b"\r\n")
    await drip(writer, b" " * 600)


async def slow_predict(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(f"/v1/models/{MODEL}:predict", Content_Length=2**20) + b"\r\n")
    await drip(writer, b" " * 600)


BOMB = gzip.compress(b" " * 2**26, 9)  # 65 KB


async def bombs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(Content_Encoding="gzip", Content_Length=len(BOMB)) + b"\r\n" + BOMB)
    await writer.drain()
    await reader.read(4096)
    await asyncio.sleep(0.5)


async def large_bodies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    size = 16 * 2**20
    writer.write(head(Content_Length=size) + b"\r\n")
    for _ in range(size // 2**16):
        writer.write(b" " * 2**16)
        await writer.drain()
        await asyncio.sleep(0.05)
    await reader.read(4096)


async def slow_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for a long answer a few times, and take 1000 bytes a second of it."""
    writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 4)
    while await reader.read(1000):
        await asyncio.sleep(1)


async def never_ending_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(Transfer_Encoding="chunked") + b"\r\n")
    while True:
        writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def idle_kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await reader.read()


KINDS: dict[str, Stranger] = {
    one.__name__: one
    for one in (
        silent, slow_head, endless_head, slow_body, slow_predict, bombs, large_bodies, slow_reader,
        never_ending_chunks, idle_kept,
    )
}  # fmt: skip


async def strangers(kind: str, port: int, count: int) -> None:
    """Each connection begins at its own time, and again at most five times a second."""
    begun: set[int] = set()

    async def one(number: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                # A reader that holds little, so that what is not taken stays with the server.
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
                if number not in begun:
                    begun.add(number)
                    if len(begun) == count:
                        print("ready", flush=True)
                try:
                    await KINDS[kind](reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.2)

    draw = random.Random(kind)
    await asyncio.gather(*(one(number, draw.random()) for number in range(count)))


if __name__ == "__main__":
    asyncio.run(strangers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
