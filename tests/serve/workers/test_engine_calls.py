"""A call that a worker hands over: its answer arrives, whenever it is given."""

import asyncio
import socket
import tracemalloc
from typing import Any

import pytest
from halfeven.serve.workers.call_frames import (
    BODY,
    LAST_BODY,
    LAST_PIECE,
    MOST,
    REQUEST,
    START,
    read_frame,
    read_start,
    request_frame,
    streams,
    write_body,
    write_frame,
)
from halfeven.serve.workers.engine_calls import answer_call

from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S
PIECES = 20
SCOPE = {
    "type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "http_version": "1.1",
    "scheme": "http", "root_path": "", "client": ("127.0.0.1", 5), "server": None, "headers": [],
}  # fmt: skip


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers before it has read the body."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"too large"})


def test_an_answer_that_comes_before_the_body_was_sent_is_not_lost() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        call = asyncio.get_running_loop().create_task(answer_call(refuses, theirs))
        reader, writer = await streams(ours)
        await write_frame(writer, REQUEST, request_frame(SCOPE))
        for _ in range(100):
            await asyncio.sleep(0)  # the answer is given, and nothing of it is read
        for _ in range(PIECES):
            await write_frame(writer, BODY, bytes(MOST))
        head, body = await read_frame(reader), await read_frame(reader)
        assert head is not None and head[0] == START and read_start(head[1])["status"] == 413
        assert body == (LAST_PIECE, b"too large")
        writer.close()
        await call

    async def in_time() -> None:
        async with asyncio.timeout(SECONDS):
            await run()

    asyncio.run(in_time())


class Frames:
    """A stream that keeps the lengths of its frames, and makes no copy of them."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append((data[0], len(data) - 5))

    async def drain(self) -> None: ...


@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("length", [0, 1, MOST - 1, MOST, MOST + 1, 3 * MOST, 3 * MOST + 1])
def test_a_body_is_cut_into_frames_and_its_last_piece_is_marked(length: int, more: bool) -> None:
    frames: Any = Frames()
    asyncio.run(write_body(frames, BODY, LAST_BODY, bytes(length), more))
    kinds, lengths = zip(*frames.written, strict=True)
    assert sum(lengths) == length and max(lengths) <= MOST and len(lengths) == max(-(-length // MOST), 1)
    assert set(kinds[:-1]) <= {BODY} and kinds[-1] == (BODY if more else LAST_BODY)


def test_the_rest_of_a_large_body_is_not_copied_for_every_frame() -> None:
    data = bytes(64 * MOST)
    tracemalloc.start()
    try:
        frames: Any = Frames()
        asyncio.run(write_body(frames, BODY, LAST_BODY, data, False))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 * MOST
