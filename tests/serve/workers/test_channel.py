"""Two ends of a channel on one event loop: everything arrives, and the end of one is heard by the other."""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from halfeven.serve.workers.channel import RING_BYTES, Channel, new_memory
from halfeven.serve.workers.ring import Message

from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S


@dataclass
class End:
    wire: socket.socket
    found: list[tuple[int, int, bytes]] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    def open(self, memory: int, first: bool) -> Channel:
        self.channel = Channel(self.wire, memory, first, 2**30, self._take, self.lost.set)
        return self.channel

    def _take(self, message: Message) -> None:
        self.found.append((message.kind, message.number, bytes(message.data)))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.found) < count:
                await asyncio.sleep(0)


def with_ends(test: Callable[[End, End], Awaitable[None]]) -> None:
    async def run() -> None:
        here, there = map(End, socket.socketpair())
        memory = new_memory()
        here.open(os.dup(memory), True)
        there.open(memory, False)
        try:
            await test(here, there)
        finally:
            here.channel.close()
            there.channel.close()

    asyncio.run(run())


def test_messages_of_both_directions_arrive_in_their_order() -> None:
    async def both(here: End, there: End) -> None:
        rng = np.random.default_rng()
        sent = [(1 + number % 7, number, rng.bytes(int(rng.integers(0, 300_000)))) for number in range(200)]
        for message in sent:
            here.channel.send(*message[:2], [message[2]])
            there.channel.send(*message[:2], [message[2]])
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await here.until(len(sent))
        await there.until(len(sent))
        assert here.found == there.found == sent

    with_ends(both)


def test_a_message_of_many_rings_arrives_whole() -> None:
    async def large(here: End, there: End) -> None:
        data = np.random.default_rng().bytes(5 * RING_BYTES + 3)
        here.channel.send(1, 1, [data])
        here.channel.send(1, 2, [b"after it"])
        await there.until(2)
        assert there.found == [(1, 1, data), (1, 2, b"after it")]

    with_ends(large)


def test_notices_that_the_other_end_does_not_read_are_not_lost() -> None:
    """Its event loop is at work: the socket's buffer is full long before its messages are read."""

    async def flood(here: End, there: End) -> None:
        here.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        loop = asyncio.get_running_loop()
        loop.remove_reader(there.wire.fileno())
        for number in range(5000):
            here.channel.send(1, number, [b"x"])
            await asyncio.sleep(0)
        loop.add_reader(there.wire.fileno(), there.channel._hear)
        await there.until(5000)
        assert [number for _, number, _ in there.found] == list(range(5000))

    with_ends(flood)


@pytest.mark.parametrize("fault", [struct.pack("<QQ", 2**50, 0), struct.pack("<QQ", 0, 1)])
def test_a_notice_that_cannot_be_true_ends_the_channel(fault: bytes) -> None:
    async def lie(here: End, there: End) -> None:
        here.wire.send(fault)
        async with asyncio.timeout(SECONDS):
            await there.lost.wait()
            await here.lost.wait()
        assert there.found == []
        here.channel.send(1, 1, [b"nobody reads it"])

    with_ends(lie)


def test_the_end_of_a_process_is_heard_once_and_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    async def dies(here: End, there: End) -> None:
        here.channel.send(1, 1, [b"the last"])
        await there.until(1)
        here.channel.close()
        async with asyncio.timeout(SECONDS):
            await there.lost.wait()
        assert there.channel.closed and not here.lost.is_set()

    with_ends(dies)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
