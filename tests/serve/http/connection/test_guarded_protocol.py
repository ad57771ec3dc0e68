"""Connections of strangers: whatever comes on one, or does not come, it costs little and ends."""

import asyncio
import json
import logging
from typing import Any

import numpy as np
import pytest
from halfeven.serve.batching.interface import Answer
from halfeven.serve.http.connection.guarded_protocol import MAX_HEAD_BYTES, MAX_HEADERS, MAX_QUEUED
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.connections import Connections
from halfeven.serve.http.limits.memory_budget import MemoryBudget
from halfeven.serve.http.limits.repeated_warnings import RepeatedWarning
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront

from ...conftest import GOOD, HISTORY, FakeRoster, make_roster
from ..wire import CHUNKED, INFER, LIVE, Wire, on_a_wire, statuses, wires


def held_back() -> FakeRoster:
    """A roster whose model answers when `release` says so."""
    roster = make_roster()
    roster.models["double"].holding = True
    return roster


def release(roster: FakeRoster) -> None:
    double = roster.models["double"]
    double.held[0].set_result(Answer([np.ones((1, 4), np.float32)], double.prepared, 1, 1, 1))


# Heads.

ENDLESS = {
    "a header": (b"GET / HTTP/1.1\r\nhost: localhost\r\na: ", b"b" * 1000, 431),
    "headers": (b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"a: b\r\n" * 10, 431),
    "long headers": (b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"a: " + b"b" * 3000 + b"\r\n", 431),
    "a URL": (b"GET /", b"b" * 1000, 414),
    "a method": (b"", b"POST" * 250, 400),
    "a chunk extension": (CHUNKED + b"1;", b"b" * 1000, 431),
    "chunk extensions": (CHUNKED, b"1;" + b"b" * 1000 + b"\r\n0\r\n", 431),
    "a trailer": (CHUNKED + b"0\r\na: ", b"b" * 1000, 431),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10, 431),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_refused_before_it_is_large(what: str) -> None:
    begin, more, status = ENDLESS[what]

    async def steps(wire: Wire) -> tuple[int, list[int]]:
        await wire.send(begin)
        sent = 0
        while not wire.written and sent < 8 * MAX_HEAD_BYTES:
            await wire.send(more)
            sent += len(more)
        return sent, statuses(wire.written)

    sent, found = on_a_wire(steps)
    assert found == [status] and sent <= MAX_HEAD_BYTES + 4096


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_is_taken_up_to_the_bound_and_refused_beyond(pieces: int) -> None:
    def head(size: int, headers: int) -> list[bytes]:
        lines = [b"a%d: " % number for number in range(headers - 1)]
        fill = size - len(LIVE) - sum(len(line) + 2 for line in lines)
        lines[-1] += b"b" * fill
        whole = LIVE[:-2] + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
        step = -(-len(whole) // pieces)
        return [whole[at : at + step] for at in range(0, len(whole), step)]

    def answered(size: int, headers: int) -> list[int]:
        return statuses(on_a_wire(lambda wire: wire.send(*head(size, headers))))

    assert answered(MAX_HEAD_BYTES - 1000, MAX_HEADERS) == [200]
    assert answered(MAX_HEAD_BYTES + 1000, MAX_HEADERS) == [431]
    assert answered(4000, MAX_HEADERS + 1) == [431]


def test_a_chunked_body_of_many_small_chunks_has_no_extensions_to_be_refused_for() -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 30_000) + b"0\r\n\r\n"
    pieces = [body[at : at + 5000] for at in range(0, len(body), 5000)]

    async def steps(wire: Wire) -> list[int]:
        await wire.send(CHUNKED, *pieces)
        while wire.protocol.tasks:
            await asyncio.sleep(0.001)
        return statuses(wire.written)

    assert on_a_wire(steps) == [200]


def test_a_refusal_says_why_and_ends_the_connection_when_the_caller_could_read_it() -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(b"GET /v2/x HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 200)
        head, _, body = wire.written.partition(b"\r\n\r\n")
        assert b"connection: close" in head and "more than 100 headers" in json.loads(body)["error"]
        assert wire.half_closed and wire.reading_paused and not wire.closed
        await wire.send(b"a: b\r\n" * 1000, LIVE)
        wire.after(3)
        assert wire.closed and statuses(wire.written) == [431]

    on_a_wire(steps)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
    ],
    ids=["none", "two", "two of 1.0"],
)
def test_a_request_names_one_host(head: bytes) -> None:
    written = on_a_wire(lambda wire: wire.send(head))
    assert statuses(written) == [400] and b"Host" in written
    assert statuses(on_a_wire(lambda wire: wire.send(b"GET /healthz HTTP/1.0\r\n\r\n"))) == [200]


# Targets that the parser of requests takes.
UNREADABLE = [b"http://a", b"http://a:/v2", b"http:///x", b"http://a:99999/", b"http://a@b@c/"]
ABSOLUTE = [b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % target for target in UNREADABLE]


@pytest.mark.parametrize(
    "bad", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", CHUNKED + b"ZZZ\r\n", *ABSOLUTE]
)
@pytest.mark.parametrize("before", [b"", LIVE], ids=["behind one", "behind two"])
def test_a_malformed_request_behind_others_is_answered_after_them_and_nothing_else_is(
    bad: bytes, before: bytes
) -> None:
    async def steps(wire: Wire) -> None:
        wire.protocol.data_received(INFER % len(GOOD) + GOOD + before + bad)
        wire.after(60)
        assert wire.written == b"" and not wire.closed
        release(roster)
        for _ in range(3):
            await wire.settled()
        expected = [200, *([200] if before else []), 400]
        assert statuses(wire.written) == expected and wire.written.count(b"connection: close") == 1
        await wire.send(LIVE)
        wire.after(3)
        assert wire.closed and statuses(wire.written) == expected

    roster = held_back()
    on_a_wire(steps, roster=roster)


@pytest.mark.parametrize("bad", ABSOLUTE)
def test_a_target_without_a_path_is_refused_in_words(bad: bytes) -> None:
    written = on_a_wire(lambda wire: wire.send(bad))
    assert statuses(written) == [400] and b"target is neither" in written
    asked = LIVE.replace(b" /", b" http://localhost/")
    assert statuses(on_a_wire(lambda wire: wire.send(asked))) == [200]


def test_a_malformed_request_of_a_caller_that_sends_no_more_is_answered_too() -> None:
    async def steps(wire: Wire) -> list[int]:
        wire.protocol.data_received(INFER % len(GOOD) + GOOD + b"nonsense\r\n\r\n")
        assert wire.protocol.eof_received()
        release(roster)
        await wire.settled()
        return statuses(wire.written)

    roster = held_back()
    assert on_a_wire(steps, roster=roster) == [200, 400]


def test_requests_sent_ahead_are_answered_up_to_a_bound() -> None:
    async def steps(wire: Wire) -> list[int]:
        wire.protocol.data_received(LIVE * 3000)
        queued = len(wire.protocol.pipeline)
        assert queued <= MAX_QUEUED
        for _ in range(queued):
            await wire.settled()
        return statuses(wire.written)

    found = on_a_wire(steps)
    assert found == [200] * (MAX_QUEUED + 1) + [400]


def test_what_follows_a_request_for_another_protocol_is_read() -> None:
    upgrade = LIVE[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    assert statuses(on_a_wire(lambda wire: wire.send(upgrade + LIVE, upgrade, LIVE))) == [200] * 4


def test_malformed_requests_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bounds = ServerBounds(10.0, malformed=RepeatedWarning(logging.getLogger("x"), "malformed"))

    async def all_of_them() -> None:
        connect = wires(bounds)
        for _ in range(150):
            wire = connect()
            await wire.send(b"nonsense\r\n\r\n")
            wire.protocol.connection_lost(None)

    with caplog.at_level(logging.WARNING):
        asyncio.run(all_of_them())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "89 more since the last line like this, 100 in all" in lines[2]


# Time.


def test_a_connection_that_sends_nothing_is_closed() -> None:
    async def steps(wire: Wire) -> None:
        wire.after(9.9)
        assert not wire.closed
        wire.after(0.2)
        assert wire.closed

    on_a_wire(steps)


@pytest.mark.parametrize("drops", [b"\r\n", b"G", b"GET /v2 HTTP/1.1\r\na: "], ids=repr)
@pytest.mark.parametrize("before", [b"", LIVE], ids=["new", "kept"])
def test_a_head_has_its_time_however_slowly_it_comes(drops: bytes, before: bytes) -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(before)
        for at in range(30):
            await wire.send(drops[at : at + 1] or (drops[-2:] if drops == b"\r\n" else b"x"))
            wire.after(1)
        assert wire.closed

    on_a_wire(steps)


@pytest.mark.parametrize("asked", [LIVE, INFER % len(GOOD) + GOOD], ids=["long way", "short way"])
def test_a_kept_connection_is_closed_when_it_was_idle_for_the_keep_alive_time(asked: bytes) -> None:
    async def steps(wire: Wire) -> None:
        for _ in range(4):
            await wire.send(asked)
            assert b"keep-alive: timeout=5\r\n" in wire.written
            wire.after(5.9)  # a second more than the caller was told
            assert not wire.closed and len(wire.timers) == 1
        wire.after(0.2)
        assert wire.closed and statuses(wire.written) == [200] * 4

    on_a_wire(steps)


def test_a_connection_whose_request_is_computed_has_all_the_time() -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(INFER % len(GOOD) + GOOD + b"GET /v2/mod")
        wire.after(60)
        assert not wire.closed
        release(roster)
        await wire.settled()
        wire.after(9.9)
        assert not wire.closed and statuses(wire.written) == [200]
        wire.after(0.2)
        assert wire.closed

    roster = held_back()
    on_a_wire(steps, roster=roster)


def test_what_is_left_of_a_body_after_its_answer_has_the_keep_alive_time() -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(b"POST /v2/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n")
        for _ in range(6):
            await wire.send(b"x" * 1000)
            wire.after(1)
        assert wire.closed and statuses(wire.written) == [404]

    on_a_wire(steps)


def test_a_slow_body_is_answered_once_and_the_connection_is_over() -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(INFER % len(GOOD) + GOOD[:9])
        for _ in range(11):
            await wire.send(b" ")
            wire.after(1)
        assert wire.closed and statuses(wire.written) == [408]
        assert wire.written.count(b"connection: close") == 1

    on_a_wire(steps)


def test_no_timer_outlives_its_connection() -> None:
    async def run() -> list[Any]:
        wire = wires()()
        await wire.send(LIVE)
        wire.unsent = 70_000
        wire.protocol.pause_writing()
        wire.protocol.connection_lost(ConnectionResetError())
        return wire.timers

    assert asyncio.run(run()) == []


# Answers that nobody takes.


def test_a_caller_that_does_not_take_its_answer_is_cut_off_and_counted_until_then() -> None:
    budget = MemoryBudget(2**20)

    async def steps(wire: Wire) -> None:
        wire.unsent = 900_000
        wire.protocol.pause_writing()
        assert budget.used == 900_000
        wire.unsent = 600_000
        wire.after(10)
        assert budget.used == 600_000 and not wire.closed
        wire.unsent = 599_000
        wire.after(10)
        assert wire.aborted and budget.used == 0

    on_a_wire(steps, ServerBounds(100.0, budget))


def test_a_caller_that_takes_its_answer_is_left_alone() -> None:
    budget = MemoryBudget(2**20)

    async def steps(wire: Wire) -> None:
        for _ in range(9):
            wire.unsent = 170_000
            wire.protocol.pause_writing()
            wire.after(9)
            wire.unsent = 0
            wire.protocol.resume_writing()
            assert budget.used == 0
        assert not wire.closed

    on_a_wire(steps, ServerBounds(100.0, budget))


def test_the_last_answer_of_a_connection_that_closes_is_waited_for_and_not_for_ever() -> None:
    async def steps(wire: Wire) -> None:
        wire.unsent = 5000
        await wire.send(LIVE[:-2] + b"connection: close\r\n\r\n")
        assert wire.closed and not wire.aborted
        wire.after(11)
        assert wire.aborted

    on_a_wire(steps)


# The number of connections.


def test_one_connection_too_many_is_refused_while_the_others_are_busy() -> None:
    async def run() -> tuple[Wire, int]:
        bounds = ServerBounds(10.0, connections=Connections(3))
        connect = wires(bounds)
        for _ in range(3):
            connect()
        late = connect()
        await late.send(LIVE)
        return late, len(bounds.connections)

    late, count = asyncio.run(run())
    assert statuses(late.written) == [503] and late.closed and count == 3
    assert b"retry-after: 1" in late.written and b"connection: close" in late.written


def test_a_connection_without_a_request_makes_room_for_a_newcomer() -> None:
    async def run() -> list[Wire]:
        connect = wires(ServerBounds(10.0, connections=Connections(3)), held_back())
        found = [connect() for _ in range(3)]
        await found[0].send(INFER % len(GOOD) + GOOD)
        for wire in found:
            wire.after(2)
        found.append(connect())
        found[3].now = found[0].now
        await found[3].send(LIVE)
        return found

    working, silent, other, late = asyncio.run(run())
    assert [wire.closed for wire in (working, silent, other)] == [False, True, False]
    assert statuses(late.written) == [200]


@pytest.mark.parametrize(
    "path", ["/v2/repository/index", "/v2/repository/models/double/load", "/v1/models/double:predict"]
)
def test_a_slow_body_of_any_route_ends_its_connection(path: str) -> None:
    async def run() -> Wire:
        roster = make_roster()
        wire = Wire(InferFront(build_app(roster, lambda: b"", HISTORY, body_timeout_s=0.01), roster))
        await wire.send(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n1".encode())
        while wire.protocol.tasks:
            await asyncio.sleep(0.001)
        return wire

    wire = asyncio.run(run())
    assert statuses(wire.written) == [408] and wire.closed and b"connection: close" in wire.written
