"""Connections for which there is no place or no descriptor: answered with 503, named in the log, and none reset."""

import asyncio
import errno
import json
import logging
import os
import re
import resource
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
import uvloop
from halfeven.serve.access.certificates import Certificates
from halfeven.serve.http.connection import listening as listening_module
from halfeven.serve.http.connection import tls as tls_module
from halfeven.serve.http.connection.listening import Listening, cannot_listen, listeners_at
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.connections import Connections
from halfeven.serve.http.limits.repeated_warnings import WarningEachSecond

from tests.serve.access.authority import Pair
from tests.server_process import announced

SECONDS = 30
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
LOOPS = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


class Greeting(asyncio.Protocol):
    """A connection that answers what comes with ``200`` and stays open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 \r\n\r\n")


class Busy:
    """A connection that stays."""

    def is_idle(self) -> bool:
        return False

    def close_idle(self) -> None: ...


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """A limit under which this process may open ``count`` descriptors more."""
    free = [os.dup(0) for _ in range(count + 1)]
    for descriptor in free:
        os.close(descriptor)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def dialled(place: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connections that wait to be accepted, each with a request."""
    with ExitStack() as stack:
        callers = []
        for _ in range(count):
            callers.append(stack.enter_context(socket.create_connection(place)))
            callers[-1].sendall(REQUEST)
            callers[-1].setblocking(False)
        yield callers


async def answer_to(caller: socket.socket) -> bytes:
    """The answer, head and body. A caller that is refused ends its connection. Raises ConnectionResetError."""
    loop, got = asyncio.get_running_loop(), b""
    while piece := await loop.sock_recv(caller, 65_536):
        got += piece
        head, end, body = got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if end and len(body) >= int(length[1] if length else 0):
            break
    if not got.startswith(b"HTTP/1.1 200"):
        with suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)  # its descriptor stays: this process may have few
    return got


def in_time(test: Callable[[], Awaitable[None]], loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        async with asyncio.timeout(SECONDS):
            await test()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


def new_listening(most: int, now_s: Callable[[], float] = lambda: 0.0) -> Listening:
    refused = WarningEachSecond(logging.getLogger("halfeven"), "a connection was refused", now_s)
    bounds = ServerBounds(connections=Connections(most), refused=refused)
    (listener,) = listeners_at("127.0.0.1", 0, 64)
    return Listening(listener, Greeting, None, bounds)


def place_of(listening: Listening) -> tuple[str, int]:
    return listening.sockets[0].getsockname()


@LOOPS
@pytest.mark.parametrize("at_once", [1, 64])
def test_what_finds_no_descriptor_is_answered_503_and_logged_once(
    loop: Callable[[], asyncio.AbstractEventLoop],
    at_once: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_module, "_AT_ONCE", at_once)

    async def most_find_none() -> None:
        listening = new_listening(1000)
        with dialled(place_of(listening), 20) as callers:
            listening.start()
            with room_for(3):
                found = await asyncio.gather(*map(answer_to, callers))
                statuses = [answer[:12] for answer in sorted(found)]
                fit = statuses.count(b"HTTP/1.1 200")
                assert fit in (2, 3), "uvloop takes one of the descriptors"
                assert statuses[fit:] == [b"HTTP/1.1 503"] * (20 - fit)
            head, _, body = max(found).partition(b"\r\n\r\n")
            assert b"retry-after: 1" in head.lower() and b"connection: close" in head.lower()
            assert json.loads(body)["code"] == "no_descriptor"
            with dialled(place_of(listening), 2) as later:
                assert all(
                    one.startswith(b"HTTP/1.1 200") for one in await asyncio.gather(*map(answer_to, later))
                )
            listening.close()

    in_time(most_find_none, loop)
    assert [record.getMessage() for record in caplog.records if "refused" in record.getMessage()] == [
        "a connection was refused: the server has no file descriptor left for another connection; try again later"
    ]


@LOOPS
def test_a_connection_above_the_limit_is_answered_503_and_logged(
    loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    """`Greeting` enters no connection: what is being set up is counted."""

    async def two_fit() -> None:
        listening = new_listening(2)
        with dialled(place_of(listening), 5) as callers:
            listening.start()
            found = await asyncio.gather(*map(answer_to, callers))
        assert [answer[:12] for answer in sorted(found)] == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 3
        assert json.loads(max(found).partition(b"\r\n\r\n")[2])["code"] == "too_many_connections"
        listening.close()

    in_time(two_fit, loop)
    (line,) = (record.getMessage() for record in caplog.records if "refused" in record.getMessage())
    assert line == "a connection was refused: 2 connections are open; try again later"


def test_a_refused_caller_that_never_closes_gives_its_descriptor_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_module, "_END_S", 0.0)

    async def closed() -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        listening = new_listening(1)
        with dialled(place_of(listening), 1) as first:
            listening.start()
            await answer_to(first[0])
            with dialled(place_of(listening), 40) as callers:
                listening._connections.enter(Busy())
                await asyncio.gather(*(asyncio.wait_for(answer_to(one), SECONDS) for one in callers))
                while listening._refusing:
                    await asyncio.sleep(0)
        listening.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before

    in_time(closed, asyncio.new_event_loop)


def test_without_even_a_kept_descriptor_the_waiting_wait_and_are_served_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(listening_module, "_KEPT_BACK", 0)

    async def waits() -> None:
        listening = new_listening(1000)
        with dialled(place_of(listening), 3) as callers:
            listening.start()
            with room_for(0):
                while not caplog.records:
                    await asyncio.sleep(0)
            found = await asyncio.gather(*map(answer_to, callers))
            assert all(answer.startswith(b"HTTP/1.1 200") for answer in found)
        listening.close()

    in_time(waits, asyncio.new_event_loop)
    assert "no connection can be accepted now" in caplog.text and "Too many open files" in caplog.text


def test_callers_that_do_not_end_their_tls_handshake_have_the_same_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_module, "_AT_ONCE", 1)

    async def limited() -> None:
        listening = new_listening(3)
        listening._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with ExitStack() as stack:
            callers = [stack.enter_context(socket.create_connection(place_of(listening))) for _ in range(8)]
            listening.start()
            while "handshakes" not in caplog.text:
                await asyncio.sleep(0)
            for caller in callers:
                caller.setblocking(False)
            assert len(listening._setting_up) == 3
            answers = [asyncio.ensure_future(answer_to(one)) for one in callers]
            while len(ended := [answer for answer in answers if answer.done()]) < 5:
                await asyncio.sleep(0)
            assert {answer.result() for answer in ended} == {b""} and len(ended) == 5
            for answer in answers:
                answer.cancel()
        listening.close()
        await listening.settled(0.0)

    in_time(limited, asyncio.new_event_loop)


def test_a_tls_handshake_that_takes_long_ends_for_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_module, "_AT_ONCE", 1)
    monkeypatch.setattr(tls_module, "_IDLE_SECONDS", 0.0)
    pair = Pair(tmp_path)

    async def answered() -> None:
        listening = new_listening(3)
        listening._tls = Certificates(pair.certificate, pair.key).server_context()
        with ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(place_of(listening))) for _ in range(3)]
            listening.start()
            while len(listening._setting_up) < 3:
                await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection(
                *place_of(listening), ssl=pair.trusting(), server_hostname="localhost"
            )
            writer.write(REQUEST)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            silent[0].setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(silent[0], 1) == b""
            assert len(listening._setting_up) == 2
            writer.transport.abort()
        listening.close()
        await listening.settled(SECONDS)

    in_time(answered, asyncio.new_event_loop)


def test_each_address_of_a_name_is_listened_on_and_one_that_cannot_be_had_is_said() -> None:
    found = listeners_at("localhost", 0, 8)
    port = taken(found)
    try:
        assert {one.getsockname()[0] for one in found} <= {"127.0.0.1", "::1"}
        for host, advice in [
            ("127.0.0.1", f"{port}: Address already in use; another server is there: .* another --port"),
            # RFC 5737: the address of no machine.
            ("192.0.2.1", ".*; --host must be an address or a name of this machine"),
        ]:
            with pytest.raises(OSError) as refused:
                listeners_at(host, port, 8)
            assert re.search(advice, str(cannot_listen(host, port, refused.value)))
        forbidden = cannot_listen("127.0.0.1", 80, PermissionError(errno.EACCES, "Permission denied"))
        assert str(forbidden).endswith("Permission denied; choose a --port above 1023")
    finally:
        for one in found:
            one.close()


def taken(found: list[socket.socket]) -> int:
    return next(one.getsockname()[1] for one in found if one.family == socket.AF_INET)


# A real server with few descriptors.


@contextmanager
def server_with(descriptors: int, store: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = min(descriptors, hard)
    with announced(store, wrapper=["prlimit", f"--nofile={wanted // 2}:{wanted}"]) as (process, url):
        yield process, int(url.rpartition(":")[2])


def status_in(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.slow(seconds=5)
def test_with_few_descriptors_every_caller_is_answered(tmp_path: Path) -> None:
    """Twice as many callers as the server may have descriptors; each keeps its connection."""
    descriptors = 120
    with server_with(descriptors, tmp_path / "store") as (process, port):

        async def ask() -> list[bytes]:
            with dialled(("127.0.0.1", port), 2 * descriptors) as callers:
                return await asyncio.gather(*map(answer_to, callers))

        found = [status_in(answer) for answer in asyncio.run(asyncio.wait_for(ask(), SECONDS))]
        assert {*found} == {200, 503}, "none was closed without an answer"

        async def answered_again() -> None:
            while status_in(await one_answer(port)) != 200:  # the server learns that the callers have gone
                pass

        asyncio.run(asyncio.wait_for(answered_again(), SECONDS))
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
    refused = [line for line in log.splitlines() if "a connection was refused" in line]
    assert 1 <= len(refused) <= SECONDS and len(refused) < found.count(503) / 2, log


async def one_answer(port: int) -> bytes:
    with dialled(("127.0.0.1", port), 1) as (caller,):
        return await answer_to(caller)
