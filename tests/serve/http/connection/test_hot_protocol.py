"""The short way from the HTTP parser to the batcher answers as the long way through ASGI does, byte for byte."""

import asyncio
import json
import re
import socket
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.models.errors import Overloaded
from halfeven.serve.http.codecs.infer import InferCodec

from tests.patience import PATIENCE_S, until

from ...conftest import ASKED, GOOD, front_of
from ..raw_requests import connected, message
from ..wire import Wire

LONG_WAY = {"expect": ""}  # a header of those that are left to ASGI


def binary() -> tuple[bytes, dict[str, str]]:
    array = np.random.default_rng().standard_normal((2, 4)).astype(np.float32)
    given = triton.InferInput("x", [2, 4], "FP32").set_data_from_numpy(array)
    body, head = triton.InferenceServerClient.generate_request_body([given])
    return body, {"inference-header-content-length": str(head)}


def one_response(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head without its date and the time it took, and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, body = data.split(b"\r\n\r\n", 1)
    found = re.search(rb"\r\ncontent-length: (\d+)", head)
    assert found, head
    while len(body) < int(found[1]):
        body += _some(connection)
    return re.sub(rb"date: [^\r]*\r\n|, total;dur=[\d.]+", b"", head), body


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the server hung up"
    return data


def sorted_lines(head: bytes) -> list[bytes]:
    return sorted(head.split(b"\r\n"))


@pytest.mark.parametrize(
    "case", ["json", "written by a thread", "binary", "bad json", "unknown input", "empty"]
)
def test_both_ways_give_the_same_answer(
    server: str, case: str, hot_requests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()
    write = InferCodec.write

    def seen(self: InferCodec, *arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(self, *arguments)

    monkeypatch.setattr(InferCodec, "write", seen)
    if case == "written by a thread":
        monkeypatch.setattr(InferCodec, "is_quick_to_write", lambda *_: False)
    body, headers = {
        "json": (json.dumps({**ASKED, "id": "me"}).encode(), {}),
        "written by a thread": (GOOD, {}),
        "binary": binary(),
        "bad json": (b'{"inputs"', {}),
        "unknown input": (json.dumps({"inputs": [{**ASKED["inputs"][0], "name": "z"}]}).encode(), {}),
        "empty": (b"[]", {}),
    }[case]
    with connected(server) as connection:
        connection.sendall(message(body, **headers))
        short = one_response(connection)
        assert len(hot_requests) == 1
        connection.sendall(message(body, **headers, **LONG_WAY))
        long = one_response(connection)
        assert len(hot_requests) == 1
    assert short[1] == long[1]
    assert sorted_lines(short[0]) == sorted_lines(long[0])
    aside = ["halfeven-predict" in name for name in threads]
    assert aside == {"json": [False] * 2, "written by a thread": [True] * 2, "binary": [False] * 2}.get(
        case, []
    )


def test_a_caller_who_leaves_while_a_thread_writes_costs_nobody_anything(
    server: str, hot_requests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, left = threading.Event(), threading.Event()
    write = InferCodec.write

    def held(self: InferCodec, *arguments: Any) -> Any:
        begun.set()
        assert left.wait(PATIENCE_S)
        return write(self, *arguments)

    monkeypatch.setattr(InferCodec, "is_quick_to_write", lambda *_: False)
    monkeypatch.setattr(InferCodec, "write", held)
    body = GOOD
    with connected(server) as leaving:
        leaving.sendall(message(body))
        assert begun.wait(PATIENCE_S)
    until(lambda: hot_requests[0].disconnected)
    left.set()
    with connected(server) as connection:
        connection.sendall(message(body))
        assert one_response(connection)[0].startswith(b"HTTP/1.1 200")
    assert not hot_requests[0].response_complete
    until(lambda: hot_requests[0].lease._budget.used == 0)


def test_a_refusal_that_says_when_to_come_back_says_it_on_the_short_way_too(server: str, roster: Any) -> None:
    roster.models["double"].refusal = Overloaded("full", 3.0)
    with connected(server) as connection:
        connection.sendall(message(GOOD))
        head, body = one_response(connection)
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 3" in head and b"full" in body


def test_many_requests_on_one_connection_alternate_between_the_ways(
    server: str, hot_requests: list[Any]
) -> None:
    body, headers = binary()
    with connected(server) as connection:
        for turn in range(6):
            connection.sendall(message(body, **headers, **({} if turn % 2 else LONG_WAY)))
            assert one_response(connection)[0].startswith(b"HTTP/1.1 200")
    assert len(hot_requests) == 3


def test_requests_sent_ahead_are_answered_in_their_order(server: str, roster: Any) -> None:
    """Pipelining: the second waits until the first has its answer."""
    bodies = [json.dumps({**ASKED, "id": str(number)}).encode() for number in range(5)]
    with connected(server) as connection:
        connection.sendall(b"".join(message(body) for body in bodies))
        data = b""
        while data.count(b'"outputs"') < 5:
            data += _some(connection)
    assert re.findall(rb'"id":"(\d)"', data) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_body_that_comes_in_pieces_is_whole(server: str, hot_requests: list[Any]) -> None:
    body, headers = binary()
    sent = message(body, **headers)
    with connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), 50):
            connection.sendall(sent[at : at + 50])
        assert one_response(connection)[0].startswith(b"HTTP/1.1 200")
    assert len(hot_requests) == 1


def test_a_connection_that_is_not_kept_alive_is_closed_after_its_answer(server: str) -> None:
    with connected(server) as connection:
        connection.sendall(message(GOOD, connection="close"))
        head, _ = one_response(connection)
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
        assert connection.recv(100) == b""


def test_a_caller_of_http_1_0_gets_no_interim_answer(server: str) -> None:
    """The caller would take an interim answer for the last one (RFC 9110 10.1.1)."""
    with connected(server) as connection:
        sent = message(GOOD, expect="100-continue")
        connection.sendall(sent.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert _some(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "headers",
    [{"expect": "100-continue"}, {"accept-encoding": "gzip"}, {"content-encoding": "identity"}],
    ids=str,
)
def test_what_asks_for_more_goes_the_long_way(
    server: str, headers: dict[str, str], hot_requests: list[Any]
) -> None:
    with connected(server) as connection:
        connection.sendall(message(GOOD, **headers))
        data = _some(connection)
        assert data.startswith((b"HTTP/1.1 200", b"HTTP/1.1 100"))
    assert hot_requests == []


@pytest.mark.parametrize(
    "lines",
    [
        ("gzip, deflate", "deflate;q=0"),
        ("deflate;q=0", "gzip, deflate"),
        ("gzip", "identity"),
        ("a" * 900, "gzip", "b" * 200),
    ],
    ids=str,
)
def test_lines_of_one_header_are_joined_whichever_way_a_request_takes(
    server: str, lines: tuple[str, ...]
) -> None:
    """RFC 9110, 5.3."""
    body = GOOD
    found = []
    for headers in ({}, LONG_WAY):
        head, rest = message(body, **headers).split(b"\r\n", 1)
        given = "".join(f"accept-encoding: {line}\r\n" for line in lines).encode()
        with connected(server) as connection:
            connection.sendall(head + b"\r\n" + given + rest)
            found.append(re.findall(rb"content-encoding: \w+", one_response(connection)[0]))
    one_line = message(body, accept_encoding=", ".join(lines))
    with connected(server) as connection:
        connection.sendall(one_line)
        found.append(re.findall(rb"content-encoding: \w+", one_response(connection)[0]))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_only_short_urls_of_models_that_are_there_are_remembered(roster: Any) -> None:
    async def run() -> dict[bytes, Any]:
        front = front_of(roster)
        wire = Wire(front)
        for number in range(300):
            for path in ("models/double/infer", f"models/no{number}/infer", f"{number}"):
                url = f"/v2/{path}"
                wire.protocol.data_received(message(GOOD, url))
            await wire.settled()
        return front.urls

    assert list(asyncio.run(run())) == [b"/v2/models/double/infer"]


def test_a_large_answer_comes_whole(server: str, roster: Any) -> None:
    roster.models["double"].compute = lambda x: [np.tile(x, (4096, 4))]
    with connected(server) as connection:
        body, headers = binary()
        connection.sendall(message(body, **headers))
        head, answer = one_response(connection)
    length = int(re.search(rb"inference-header-content-length: (\d+)", head)[1])  # pyright: ignore
    assert len(answer) - length == 2 * 4096 * 16 * 4


def test_an_answer_that_cannot_be_written_is_a_500_and_the_connection_stays(server: str, roster: Any) -> None:
    served = roster.models["double"]
    with connected(server) as connection:
        for compute, status in ((lambda _: [], b"500"), (served.compute, b"200")):
            served.compute = compute
            connection.sendall(message(GOOD))
            assert one_response(connection)[0].split()[1] == status
