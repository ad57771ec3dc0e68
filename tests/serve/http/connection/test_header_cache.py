"""A head that was read once is not read again, and nobody can tell by the answers."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.http.connection import guarded_protocol, hot_protocol
from halfeven.serve.http.connection.guarded_protocol import GuardedProtocol
from halfeven.serve.http.connection.header_cache import KnownHead
from halfeven.serve.http.connection.hot_protocol import HotProtocol
from uvicorn.config import Config
from uvicorn.server import ServerState

from ...conftest import GOOD, FakeRoster, front_of, make_roster
from ..raw_requests import message
from ..wire import Transport

INFER = "/v2/models/double/infer"
MOST = 4096  # bytes of a body


def good(first: float = 1.0, **headers: str) -> bytes:
    given = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [given]}).encode()
    body = head + np.array([first, 2, 3, 4], np.float32).tobytes()
    return message(body, inference_header_content_length=str(len(head)), **headers)


class Line(Transport):
    """One connection, on the running loop and its clock."""

    def __init__(self, roster: FakeRoster) -> None:
        super().__init__()
        config = Config(
            front_of(roster, max_body_bytes=MOST), lifespan="off", proxy_headers=False, log_level="critical"
        )
        config.load()
        self.protocol = HotProtocol(config, ServerState(), {}, asyncio.get_running_loop())
        self.protocol.connection_made(cast(Any, self))

    async def send(self, *pieces: bytes) -> list[bytes]:
        """The answers to all of it so far, each ended; times and what may differ in order left out."""
        for piece in pieces:
            if not self.closed:
                self.protocol.data_received(piece)
                await self._settled()
        await self._settled()
        return answers(self.written)

    async def _settled(self) -> None:
        while self.protocol.tasks and any(not task.done() for task in self.protocol.tasks):
            if self._waits_for_body():
                break
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)

    def _waits_for_body(self) -> bool:
        cycle = self.protocol.cycle
        return cycle is not None and getattr(cycle, "more_body", False) and not cycle.body

    def end(self) -> None:
        self.protocol.connection_lost(None)

    def can_write_eof(self) -> bool:
        return False


def answers(written: bytes) -> list[bytes]:
    plain = re.sub(rb"date: [^\r]*\r\n|server-timing: [^\r]*\r\n", b"", written)
    return re.split(rb"(?=HTTP/1\.1 )", plain)[1:]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bytes that the parser was given."""
    seen: list[bytes] = []
    read = GuardedProtocol.data_received

    def counted(self: GuardedProtocol, data: bytes) -> None:
        seen.append(data)
        read(self, data)

    monkeypatch.setattr(GuardedProtocol, "data_received", counted)
    return seen


def sent(*pieces: bytes, roster: FakeRoster | None = None) -> list[bytes]:
    async def run() -> list[bytes]:
        line = Line(roster or make_roster())
        try:
            return await line.send(*pieces)
        finally:
            line.end()

    return asyncio.run(run())


def first_of(answer: bytes) -> float:
    return json.loads(answer[answer.index(b"\r\n\r\n") :])["outputs"][0]["data"][0]


def test_the_same_head_with_other_bodies_is_parsed_once(parsed: list[bytes]) -> None:
    found = sent(*(good(float(number)) for number in range(6)))
    assert [first_of(answer) for answer in found] == [0, 2, 4, 6, 8, 10]
    assert len(parsed) == 1


def test_another_head_is_parsed_and_then_known_itself(parsed: list[bytes]) -> None:
    pieces = [good(1), good(2), good(3, user_agent="me"), good(4, user_agent="me"), good(5)]
    assert [first_of(answer) for answer in sent(*pieces)] == [2, 4, 6, 8, 10]
    assert parsed == [pieces[0], pieces[2], pieces[4]]


@pytest.mark.parametrize("path", [INFER, "/v2/models/nobody/infer", "/v1/nothing"])
def test_a_request_inside_the_body_of_another_is_no_request(path: str) -> None:
    """A person who decides on a body would ask in the caller's name otherwise."""
    outer = message(good(2), path)
    cut = len(outer) - len(good(2))
    found = sent(good(1), good(1), outer[:cut], outer[cut:])
    assert len(found) == 3 and found[2].startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))


def test_what_follows_half_a_head_is_the_rest_of_it(parsed: list[bytes]) -> None:
    begun = b"GET /v2/health/live HTTP/1.1\r\ncontent-length: 0\r\nx-note: "
    found = sent(good(1), good(2), begun, good(3))
    assert parsed == [good(1), begun, good(3)]
    assert [answer[9:12] for answer in found] == [b"200", b"200", b"400"]


def test_line_ends_between_requests_are_no_part_of_a_body(parsed: list[bytes]) -> None:
    body = b'{"inputs": []}'
    found = sent(message(body) + b"\r\n", message(body) + b"\r\n", message(body), b"\r\n", good(3), good(4))
    assert [answer[9:12] for answer in found] == [b"400", b"400", b"400", b"200", b"200"]
    assert parsed == [message(body) + b"\r\n"] * 2 + [message(body), b"\r\n", good(3)]


def test_a_model_that_is_gone_is_not_answered_for_by_a_head_that_was_known() -> None:
    async def run() -> list[bytes]:
        roster = make_roster()
        line = Line(roster)
        await line.send(good(1), good(2))
        roster.unload("double")
        return await line.send(good(3))

    assert [answer[9:12] for answer in asyncio.run(run())] == [b"200", b"200", b"404"]


def test_a_body_that_ends_where_a_request_begins_is_no_part_of_its_head(parsed: list[bytes]) -> None:
    rest = good(3)[-4:] + good(4)
    found = sent(good(1)[:9], good(1)[9:], good(3)[:-4], rest, rest)
    assert [answer[9:12] for answer in found] == [b"200", b"200", b"200", b"400"]
    assert parsed[-1] == rest


@pytest.mark.parametrize("way", [{}, {"expect": ""}], ids=["short", "long"])
def test_while_one_is_computed_the_next_waits_for_it_known_or_not(way: dict[str, str]) -> None:
    async def run() -> list[bytes]:
        roster = make_roster()
        line = Line(roster)
        await line.send(good(1), good(2))
        double = roster.models["double"]
        double.holding = True
        held = asyncio.ensure_future(line.send(good(3, **way)))
        while not double.held:
            await asyncio.sleep(0)
        double.holding = False
        line.protocol.data_received(good(4))
        double.held[0].set_exception(Overloaded("full", 1.0))
        await held
        return await line.send()

    found = asyncio.run(run())
    assert [answer[9:12] for answer in found] == [b"200", b"200", b"503", b"200"]
    assert first_of(found[3]) == 8


def test_a_caller_who_does_not_read_is_left_to_what_waits_for_him(parsed: list[bytes]) -> None:
    async def run() -> None:
        line = Line(make_roster())
        await line.send(good(1), good(2))
        line.protocol.pause_writing()
        line.protocol.data_received(good(3))
        line.protocol.resume_writing()
        await line.send()

    asyncio.run(run())
    assert parsed == [good(1), good(3)]


def test_a_connection_is_not_idle_while_a_request_with_a_known_head_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded_protocol, "_IDLE_SECONDS", 0.0)

    async def run() -> bool:
        roster = make_roster()
        line = Line(roster)
        await line.send(good(1), good(2))
        assert line.protocol.is_idle()
        roster.models["double"].holding = True
        await line.send(good(3))
        return line.protocol.is_idle()

    assert not asyncio.run(run())


def kinds(draw: random.Random) -> Iterator[bytes]:
    """Messages of every kind, mostly the plain one."""
    plain = good(draw.randrange(100))
    while True:
        yield draw.choice(
            [
                *[good(draw.randrange(100))] * 5,
                plain,
                b"\r\n" + plain,
                good(7, expect=""),
                good(8, x_request_id="me"),
                message(plain),
                message(plain, "/v2/models/nobody/infer"),
                message(b"", "/v2/health/live", "GET"),
                message(b'{"inputs": []}'),
                message(GOOD),
            ]
        )


def pieces_of(draw: random.Random) -> list[bytes]:
    """A dozen messages; most come in one piece, some are torn, some stick together."""
    messages = kinds(draw)
    pieces = [b""]
    for _ in range(12):
        one, how = next(messages), draw.random()
        if how < 0.6:
            pieces.append(one)
        elif how < 0.8:
            at = sorted(draw.sample(range(1, len(one)), 2))
            pieces += [one[: at[0]], one[at[0] : at[1]], one[at[1] :]]
        else:
            pieces[-1] += one
    return [piece for piece in pieces if piece]


@pytest.mark.slow
def test_whatever_comes_in_whatever_pieces_is_answered_as_by_the_parser_alone(
    monkeypatch: pytest.MonkeyPatch, parsed: list[bytes]
) -> None:
    drawn = [pieces_of(random.Random(np.random.default_rng().bytes(8))) for _ in range(20)]
    knowing = [sent(*pieces) for pieces in drawn]
    spared = sum(map(len, drawn)) - len(parsed)
    monkeypatch.setattr(hot_protocol, "KnownHead", type("Nothing", (), {"of": staticmethod(lambda *_: None)}))
    parsed.clear()
    assert knowing == [sent(*pieces) for pieces in drawn]
    assert sum(map(len, drawn)) == len(parsed) and spared > 3


def test_a_head_is_known_only_where_the_piece_is_one_request() -> None:
    one = good(1)
    size = len(one) - one.index(b"\r\n\r\n") - 4
    head = KnownHead.of(one, size, ("double", None), None, True)
    assert head is not None and head.body_of(one) == one[-size:]
    assert head.body_of(one[:-1]) is head.body_of(one + b" ") is head.body_of(b" " + one[:-1]) is None
    for piece in (one + b"\r\n", b"\r\n\r\n" + one, one + one, one[1:-1]):
        assert KnownHead.of(piece, size, ("double", None), None, True) is None
