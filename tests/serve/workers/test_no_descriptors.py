"""Processes that have no descriptor left: a request is refused, a channel is asked for again, nothing is left open."""

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.workers import http_worker
from halfeven.serve.workers.channel import new_memory
from halfeven.serve.workers.control import Control, read_packet, send_packet
from halfeven.serve.workers.engine_app import Collected, EngineApp
from halfeven.serve.workers.engine_link import EngineLink
from halfeven.serve.workers.engine_process import _EngineServer
from halfeven.serve.workers.http_worker import _WorkerServer
from halfeven.serve.workers.worker_gauges import WorkerGauges

from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S
ROSTER: Any = SimpleNamespace(leave=lambda: None, all=list)
SCOPE = {
    "type": "http", "method": "GET", "path": "/v2/models/double", "raw_path": b"", "query_string": b"",
    "http_version": "1.1", "scheme": "http", "root_path": "", "headers": [],
}  # fmt: skip


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """This process may open so many descriptors more."""
    free = [os.dup(0) for _ in range(count + 1)]
    for descriptor in free:
        os.close(descriptor)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def is_closed_at_its_other_end(wire: socket.socket) -> bool:
    wire.settimeout(SECONDS)
    return wire.recv(1) == b""


def closes_a_connect(room: int, hears: Callable[[dict[str, Any], list[int]], None]) -> bool:
    """Give ``hears`` a ``connect`` while only ``room`` more descriptors can be opened. True where both sockets of the
    ``connect`` are closed afterwards, and no descriptor is left open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wires, calls, memory = socket.socketpair(), socket.socketpair(), new_memory()
    sent = [wires[1].fileno(), calls[1].fileno(), memory]
    assert send_packet(ours, {"connect": True, "pid": 1}, sent)
    wires[1].close()
    calls[1].close()
    os.close(memory)
    with room_for(room):
        packet = read_packet(theirs)
        assert packet is not None
        hears(*packet)
    closed = all(map(is_closed_at_its_other_end, (wires[0], calls[0])))
    for one in (ours, theirs, wires[0], calls[0]):
        one.close()
    return closed and len(list(Path("/proc/self/fd").iterdir())) == before


def in_time(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(SECONDS):
            await test()

    asyncio.run(run())


# How many of the three descriptors come; where all do, there is none left to map the memory.
ROOM = pytest.mark.parametrize("room", range(4))


@ROOM
def test_a_worker_without_room_for_a_channel_asks_for_another_one(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_worker, "_NO_DESCRIPTOR_S", 0.0)

    async def asks() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            link = EngineLink(lambda: None)
            worker = _WorkerServer(uvicorn.Config(cast(Any, None)), theirs, link, Control(theirs))
            assert closes_a_connect(room, worker._hear)
            assert link.calls is None
            ours.setblocking(False)
            said = await asyncio.get_running_loop().sock_recv(ours, 1000)
            assert said == b'{"alone":true}'

    in_time(asks)


@ROOM
def test_an_engine_process_without_room_for_a_channel_closes_its_end_and_goes_on(room: int) -> None:
    async def goes_on() -> None:
        front, gauges, control = InferFront(cast(Any, None), ROSTER), WorkerGauges(1), cast(Any, None)
        engine = _EngineServer(
            uvicorn.Config(front), front, ROSTER, control, gauges, lambda sentence: None, None
        )
        assert closes_a_connect(room, engine._hear)
        assert gauges.pids == []

    in_time(goes_on)


def test_a_request_for_which_no_descriptor_is_left_is_refused_for_a_moment() -> None:
    async def refused() -> None:
        ours, theirs = socket.socketpair()
        collected = Collected(b"")
        with ours, theirs, room_for(0):
            await EngineApp(lambda: ours)(SCOPE, collected.receive, collected.send)
        assert (collected.status, dict(collected.headers)[b"retry-after"]) == (503, b"1")

    in_time(refused)
