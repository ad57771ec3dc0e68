"""A caller that has sent its last byte is answered; one that has left gives its place back.

Real sockets, since only the system knows the difference.
"""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from halfeven.serve.access.certificates import Certificates
from halfeven.serve.batching.interface import Answer
from halfeven.serve.http.connection.half_closed import INTERIM

from tests.serve.access.authority import Pair

from ...conftest import GOOD, FakeRoster, FakeServed, front_of, make_roster, running, started
from ..raw_requests import message
from ..wire import LIVE, statuses

SECONDS = 20
WAYS = {"short way": {}, "long way": {"x-request-id": "7"}}  # from the parser; through ASGI


class Secured:
    """A caller over TLS that may end its side alone, as OpenSSL, Java and Go can; Python's own sockets cannot."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        self.plain, self._in, self._out = plain, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")
        self._until_done(self._tls.do_handshake)

    def _until_done(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._flush()
                if not (piece := self.plain.recv(65536)):
                    raise
                self._in.write(piece)
            finally:
                self._flush()

    def _flush(self) -> None:
        if out := self._out.read():
            self.plain.sendall(out)

    def send(self, data: bytes, notify: bool, shut: bool) -> None:
        """Send the data and the end of this side in one piece: an alert, the end of the bytes, or both."""
        self._tls.write(data)
        if notify:
            with suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
        self._flush()
        if shut:
            self.plain.shutdown(socket.SHUT_WR)

    def everything(self) -> bytes:
        pieces = []
        with suppress(ssl.SSLZeroReturnError):  # the server's alert, after one of this side
            while piece := self._until_done(lambda: self._tls.read(65536)):
                pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def serving_tls(roster: FakeRoster, folder: Path) -> Iterator[Callable[[], Secured]]:
    """A function that makes a connection with TLS; all connections are closed at the end."""
    pair = Pair(folder)
    with (
        started(front_of(roster), tls=Certificates(pair.certificate, pair.key).server_context()) as server,
        ExitStack() as opened,
    ):
        port = server.servers[0].sockets[0].getsockname()[1]

        def connect() -> Secured:
            plain = opened.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            return Secured(plain, pair.trusting())

        yield connect


@contextmanager
def connected(roster: FakeRoster) -> Iterator[socket.socket]:
    with running(front_of(roster)) as url:
        host, _, port = url.partition(":")
        with socket.create_connection((host, int(port)), SECONDS) as caller:
            yield caller


def everything(caller: socket.socket) -> bytes:
    pieces = []
    while piece := caller.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def answer(double: FakeServed) -> None:
    """Answer what is held, on the server's own loop."""
    (held,) = double.held
    value = Answer([np.ones((1, 4), np.float32)], double.prepared, 1, 1, 1)
    held.get_loop().call_soon_threadsafe(held.set_result, value)


ASKED = {
    "short way": message(GOOD),
    "long way": message(GOOD, **WAYS["long way"]),
    "another route": LIVE,
    "three at once": LIVE * 3,
    "two routes": LIVE + message(GOOD),
    "two on the short way": message(GOOD) + message(GOOD),
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
        caller.sendall(message(GOOD, **WAYS[way]))
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(len(INTERIM), socket.MSG_WAITALL) == INTERIM  # is anybody there?
        answer(double)
        assert statuses(everything(caller)) == [200]
        assert not double.cancelled.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_caller_that_has_left_gives_its_place_back_before_there_is_an_answer(way: str) -> None:
    roster = make_roster()
    double = roster.models["double"]
    double.holding = True
    with connected(roster) as caller:
        caller.sendall(message(GOOD, **WAYS[way]))
        assert double.submitted.wait(SECONDS)
        caller.close()
        assert double.cancelled.wait(SECONDS)


@pytest.mark.parametrize("sent", [b"", LIVE[:20], message(b"abcde")[:-2]])
def test_what_can_never_be_whole_is_not_waited_for(sent: bytes) -> None:
    with connected(make_roster()) as caller:
        caller.sendall(sent)
        caller.shutdown(socket.SHUT_WR)
        assert everything(caller) == b""


def test_what_came_before_a_request_that_is_cut_off_is_answered() -> None:
    with connected(make_roster()) as caller:
        caller.sendall(LIVE + message(GOOD) + message(GOOD, **WAYS["long way"])[:-5])
        caller.shutdown(socket.SHUT_WR)
        assert statuses(everything(caller).replace(INTERIM, b"")) == [200, 200]


ENDS = {"an alert": (True, False), "an alert and the end": (True, True), "the end alone": (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_over_tls_a_caller_that_has_sent_its_last_byte_is_answered_and_then_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion, loop: str
) -> None:
    chosen = uvicorn.Config(lambda: None, loop=loop).get_loop_factory()  # type: ignore[arg-type]
    monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda config: chosen)
    monkeypatch.setattr(Pair, "trusting", at_most(version))
    with serving_tls(make_roster(), tmp_path) as connect:
        for end, sent in product(ENDS.values(), ASKED.values()):
            caller = connect()
            caller.send(sent, *end)
            answers = caller.everything()
            assert statuses(answers.replace(INTERIM, b"")) == [200] * sent.count(b" HTTP/1.1")


def at_most(version: ssl.TLSVersion) -> Callable[[Pair], ssl.SSLContext]:
    trusting = Pair.trusting

    def context(pair: Pair) -> ssl.SSLContext:
        found = trusting(pair)
        found.maximum_version = version
        return found

    return context


@pytest.mark.slow
def test_over_tls_a_late_answer_comes_too_and_a_caller_that_left_gives_its_place_back(tmp_path: Path) -> None:
    roster = make_roster()
    double = roster.models["double"]
    double.holding = True
    with serving_tls(roster, tmp_path) as connect:
        for end in ENDS.values():
            double.submitted.clear()
            double.held.clear()
            caller = connect()
            caller.send(message(GOOD), *end)
            assert double.submitted.wait(SECONDS)
            answer(double)
            assert statuses(caller.everything().replace(INTERIM, b"")) == [200]
            assert not double.cancelled.is_set()
        for end in ENDS.values():
            double.submitted.clear()
            double.cancelled.clear()
            caller = connect()
            caller.send(message(GOOD), *end)
            assert double.submitted.wait(SECONDS)
            caller.plain.close()
            assert double.cancelled.wait(SECONDS)


@pytest.mark.slow
def test_over_tls_what_can_never_be_whole_is_not_waited_for(tmp_path: Path) -> None:
    with serving_tls(make_roster(), tmp_path) as connect:
        for end, sent in product(ENDS.values(), [LIVE[:20], message(GOOD)[:-3]]):
            caller = connect()
            caller.send(sent, *end)
            assert caller.everything() == b""
