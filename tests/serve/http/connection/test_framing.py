"""Bytes that readers of HTTP read differently are refused, and the connection ends: `tests/fuzz/test_framing.py` draws
streams."""

import pytest
from halfeven.serve.http.connection.framing import Cuts

from ...conftest import GOOD
from ..wire import CHUNKED, INFER, LIVE, Wire, on_a_wire, statuses

HOST = b"host: localhost\r\n"
DIFFERING = {
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "two spaces": (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two spaces before the version": (b"GET /  HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "two spaces and an upgrade": (
        b"GET  / HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n",
        400,
    ),
    "another version": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "another protocol": (b"GET / RTSP/1.0\r\n" + HOST + b"\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a coding that is not read": (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n", 501),
    "an empty coding": (CHUNKED.replace(b"chunked", b", chunked") + b"0\r\n\r\n", 501),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"/1.1", b"/1.0") + b"0\r\n\r\n", 501),
    "a length beside chunks": (
        CHUNKED.replace(HOST, HOST + b"content-length: 3\r\n") + b"0\r\n\r\n",
        400,
    ),
    "two lengths": (INFER % 3 + b"abc", 200),
    "a negative length": (LIVE.replace(HOST, HOST + b"content-length: -5\r\n"), 400),
    "a length in words": (LIVE.replace(HOST, HOST + b"content-length: five\r\n"), 400),
    "a length of two numbers": (LIVE.replace(HOST, HOST + b"content-length: 5, 5\r\n"), 400),
    "a header without a name": (LIVE.replace(HOST, HOST + b": x\r\n"), 400),
    "a null byte": (LIVE.replace(HOST, HOST + b"a: a\0b\r\n"), 400),
    "a folded header": (LIVE.replace(HOST, HOST + b"a: b\r\n c\r\n"), 400),
    "a line feed alone": (LIVE.replace(HOST, HOST + b"a: b\n"), 400),
    "a space before the colon": (LIVE.replace(b"host:", b"host :"), 400),
}
DIFFERING["two lengths"] = (
    (INFER % 3).replace(b"content-length: 3\r\n", b"content-length: 3\r\n" * 2) + b"abc",
    400,
)


@pytest.mark.parametrize("kind", DIFFERING)
@pytest.mark.parametrize("by_byte", [False, True])
def test_what_readers_differ_about_ends_the_connection(kind: str, by_byte: bool) -> None:
    sent, status = DIFFERING[kind]

    async def steps(wire: Wire) -> None:
        await wire.send(LIVE)
        await wire.send(*([bytes([one]) for one in sent] if by_byte else [sent]))
        await wire.send(LIVE)
        assert statuses(wire.written) == [200, status]
        assert b"connection: close" in wire.written and (wire.closed or wire.half_closed)

    on_a_wire(steps)


def test_spaces_around_a_value_are_not_part_of_it() -> None:
    asked = (INFER % len(GOOD)).replace(
        b"content-length: %d" % len(GOOD), b"content-length:\t%d \t" % len(GOOD)
    )

    async def steps(wire: Wire) -> None:
        assert statuses(await wire.send(asked + GOOD, LIVE)) == [200, 200]

    on_a_wire(steps)


def test_a_caller_that_is_refused_while_it_waits_to_send_its_body_sends_its_next_request_elsewhere() -> None:
    """The next bytes of the caller might be the body, or another request: nobody can tell."""
    asked = (
        (INFER % len(GOOD)).replace(b"double", b"nobody").replace(HOST, HOST + b"expect: 100-continue\r\n")
    )

    async def steps(wire: Wire) -> None:
        assert statuses(await wire.send(asked)) == [404]
        assert b"connection: close" in wire.written and wire.closed

    on_a_wire(steps)


def test_a_caller_that_was_told_to_send_its_body_goes_on() -> None:
    asked = (INFER % len(GOOD)).replace(HOST, HOST + b"expect: 100-continue\r\n")

    async def steps(wire: Wire) -> None:
        assert statuses(await wire.send(asked, GOOD, LIVE)) == [100, 200, 200]

    on_a_wire(steps)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_slices_end_where_heads_and_bodies_end(size: int) -> None:
    """Heads, a body with a length that has the end of a head in it, a chunked body."""
    parts = [
        b"A\r\nb: c\r\n\r\n",
        b"\r\n\r\nxyz\r\n\r\n",
        b"B\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\n",
        b"C\r\n\r\n",
    ]
    whole, cuts, read, ends = b"".join(parts), Cuts(), 0, set[int]()
    for start in range(0, len(whole), size):
        data, at = whole[start : start + size], 0
        while at < len(data):
            if read == len(parts[0]) and not cuts.body_left:
                cuts.body_left = len(parts[1])
            end = cuts.end(data, at)
            read, at = read + end - at, end
            ends.add(read)
    assert {sum(map(len, parts[:count])) for count in range(1, 6)} <= ends
