"""A caller that has sent its last byte is answered; one that has left gives its place back.

Real sockets, since only the system knows the difference.
"""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from halfeven.serve.batching.interface import Answer
from halfeven.serve.http.connection.half_closed import INTERIM
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront

from ...conftest import HISTORY, FakeRoster, FakeServed, make_roster, running

BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
).encode()
HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
SECONDS = 20


def infer(more: bytes = b"") -> bytes:
    return HEAD % (b"/v2/models/double/infer", more, len(BODY)) + BODY


WAYS = {"short way": b"", "long way": b"x-request-id: 7\r\n"}  # from the parser; through ASGI


@contextmanager
def connected(roster: FakeRoster) -> Iterator[socket.socket]:
    front = InferFront(build_app(roster, lambda: b"", HISTORY), roster)
    with running(front) as url:
        host, _, port = url.partition(":")
        with socket.create_connection((host, int(port)), SECONDS) as caller:
            yield caller


def everything(caller: socket.socket) -> bytes:
    pieces = []
    while piece := caller.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def statuses(data: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+)", data)]


def answer(double: FakeServed) -> None:
    """Answer what is held, on the server's own loop."""
    (held,) = double.held
    value = Answer([np.ones((1, 4), np.float32)], double.prepared, 1, 1, 1)
    held.get_loop().call_soon_threadsafe(held.set_result, value)


ASKED = {
    "short way": infer(),
    "long way": infer(WAYS["long way"]),
    "another route": LIVE,
    "three at once": LIVE * 3,
    "two routes": LIVE + infer(),
    "two on the short way": infer() + infer(),
}


@pytest.mark.parametrize("sent", ASKED.values(), ids=ASKED)
def test_a_caller_that_has_sent_its_last_byte_is_answered_and_then_closed(sent: bytes) -> None:
    with connected(make_roster()) as caller:
        caller.sendall(sent)
        caller.shutdown(socket.SHUT_WR)
        answers = everything(caller)
    assert statuses(answers.replace(INTERIM, b"")) == [200] * sent.count(b" HTTP/1.1")


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_takes_long_reaches_a_caller_that_has_sent_its_last_byte(way: str) -> None:
    roster = make_roster()
    double = roster.models["double"]
    double.holding = True
    with connected(roster) as caller:
        caller.sendall(infer(WAYS[way]))
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(len(INTERIM), socket.MSG_WAITALL) == INTERIM  # is anybody there?
        answer(double)
        assert statuses(everything(caller)) == [200]
        assert not double.cancelled.is_set()


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_that_has_left_gives_its_place_back_before_there_is_an_answer(way: str) -> None:
    roster = make_roster()
    double = roster.models["double"]
    double.holding = True
    with connected(roster) as caller:
        caller.sendall(infer(WAYS[way]))
        assert double.submitted.wait(SECONDS)
        caller.close()
        assert double.cancelled.wait(SECONDS)


@pytest.mark.parametrize("sent", [b"", LIVE[:20], HEAD % (b"/v2/models/double/infer", b"", 5) + b"abc"])
def test_what_can_never_be_whole_is_not_waited_for(sent: bytes) -> None:
    with connected(make_roster()) as caller:
        caller.sendall(sent)
        caller.shutdown(socket.SHUT_WR)
        assert everything(caller) == b""


def test_what_came_before_a_request_that_is_cut_off_is_answered() -> None:
    with connected(make_roster()) as caller:
        caller.sendall(LIVE + infer() + infer(WAYS["long way"])[:-5])
        caller.shutdown(socket.SHUT_WR)
        assert statuses(everything(caller).replace(INTERIM, b"")) == [200, 200]
