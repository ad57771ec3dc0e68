"""Nobody who was let in leaves without an answer: the end of a server, on the wire."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.serve.batching.interface import Answer
from halfeven.serve.http.connection import polite_server
from halfeven.serve.http.connection.hot_protocol import HotProtocol
from halfeven.serve.http.connection.polite_server import PoliteServer

from tests.patience import PATIENCE_S, until
from tests.serve.conftest import GOOD, FakeRoster, front_of, make_roster, started
from tests.serve.http.raw_requests import message

FOREVER_S = 60.0
LONG_WAY = {"x-request-id": "me"}


def get(path: str) -> bytes:
    return message(b"", path, "GET")


class Wire:
    """One connection; `read` gives (status, whether the server said that it closes, body)."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._reader = self.socket.makefile("rb")

    def ask(self, message: bytes) -> tuple[int, bool, bytes]:
        self.socket.sendall(message)
        return self.read()

    def read(self) -> tuple[int, bool, bytes]:
        line = self._reader.readline()
        assert line, "the connection was closed without an answer"
        fields: dict[str, str] = {}
        while (field := self._reader.readline().decode().strip()) != "":
            name, _, value = field.partition(":")
            fields[name.lower()] = value.strip().lower()
        body = self._reader.read(int(fields.get("content-length", 0)))
        return int(line.split()[1]), fields.get("connection") == "close", body

    def ended(self) -> bool:
        return self._reader.read(1) == b""

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


class Leaving:
    """A server over a roster that a test holds in its hand."""

    def __init__(self, server: PoliteServer, roster: FakeRoster, stack: ExitStack) -> None:
        self.server, self.roster, self._stack = server, roster, stack
        self.port: int = server.servers[0].sockets[0].getsockname()[1]

    def dial(self) -> Wire:
        wire = Wire(self.port)
        self._stack.callback(wire.close)
        return wire

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.server.handle_exit(number, None)

    def until_leaving(self) -> None:
        until(lambda: self.server._state.leaving, between_s=0.005)

    def is_refused(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    roster = make_roster()

    def leave() -> None:
        roster.leaving, roster.reasons = True, ["the server is shutting down"]

    with (
        ExitStack() as stack,
        started(front_of(roster), grace_s=FOREVER_S, on_leaving=leave, quiet_s=0.2) as server,
    ):
        yield Leaving(server, roster, stack)
        server.should_exit = server._hurried = True


@pytest.mark.parametrize("more", [{}, LONG_WAY], ids=["short way", "long way"])
def test_readiness_falls_first_and_everybody_is_answered_and_told_until_the_port_closes(
    leaving: Leaving, more: dict[str, str]
) -> None:
    asked_before, silent = leaving.dial(), leaving.dial()
    assert asked_before.ask(message(GOOD, **more))[:2] == (200, False)
    assert asked_before.ask(message(GOOD, **more))[:2] == (200, False)  # its head is known now
    assert asked_before.ask(get("/v2/health/ready"))[:2] == (200, False)
    assert asked_before.ask(get("/v2/models/double/ready"))[:2] == (200, False)
    assert asked_before.ask(message(GOOD, **more))[:2] == (200, False)
    leaving.signal()
    leaving.until_leaving()
    assert leaving.dial().ask(get("/v2/health/ready"))[0] == 503
    assert leaving.dial().ask(get("/v2/models/double/ready"))[0] == 503
    assert leaving.dial().ask(get("/v2/health/live"))[0] == 200
    for wire in (asked_before, silent, leaving.dial()):
        assert wire.ask(message(GOOD, **more))[:2] == (200, True)
        assert wire.ended()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LONG_WAY], ids=["short way", "long way"])
def test_what_is_computed_when_the_port_closes_is_answered_and_told(
    leaving: Leaving, more: dict[str, str]
) -> None:
    double = leaving.roster.models["double"]
    double.holding = True
    wire, late = leaving.dial(), leaving.dial()
    wire.socket.sendall(message(GOOD, **more))
    until(lambda: len(double.held) == 1)
    late.socket.sendall(message(GOOD, **more)[:-10])
    leaving.signal()
    leaving.signal()  # the second one ends the grace
    until(leaving.is_refused)
    late.socket.sendall(message(GOOD, **more)[-10:])
    until(lambda: len(double.held) == 2)
    answer(leaving, double)
    assert wire.read()[:2] == late.read()[:2] == (200, True)
    assert wire.ended() and late.ended()


def answer(leaving: Leaving, double: Any) -> None:
    def settle() -> None:
        for future in double.held:
            future.set_result(Answer([np.zeros((1, 4), np.float32)], double.prepared, 1, 1, 1))

    double.held[0].get_loop().call_soon_threadsafe(settle)


@pytest.mark.parametrize("more", [{}, LONG_WAY], ids=["short way", "long way"])
def test_requests_that_came_together_are_all_answered_and_the_last_one_told(
    leaving: Leaving, more: dict[str, str]
) -> None:
    wire = leaving.dial()
    leaving.signal()
    leaving.until_leaving()
    wire.socket.sendall(message(GOOD, **more) * 4)
    assert [wire.read()[:2] for _ in range(4)] == [(200, False)] * 3 + [(200, True)]
    assert wire.ended()


def test_an_answer_that_had_begun_is_not_the_last_one_for_it_could_not_say_so() -> None:
    """A download that streams while the server begins to leave."""
    go_on = threading.Event()

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.to_thread(go_on.wait, 20)
        await send({"type": "http.response.body", "body": b"b"})

    with ExitStack() as stack, started(streaming, grace_s=FOREVER_S) as server:
        own = Leaving(server, make_roster(), stack)
        wire = own.dial()
        wire.socket.sendall(get("/"))
        assert wire.socket.recv(1, socket.MSG_PEEK)
        own.signal()
        own.until_leaving()
        go_on.set()
        assert wire.read() == (200, False, b"ab")
        assert wire.ask(get("/"))[:2] == (200, True)
        own.signal()


def test_a_quiet_connection_is_closed_at_the_end_alone(leaving: Leaving) -> None:
    quiet, never = leaving.dial(), leaving.dial()
    assert quiet.ask(message(GOOD))[0] == 200
    leaving.signal()
    leaving.until_leaving()
    assert leaving.dial().ask(message(GOOD))[:2] == (200, True)
    for wire in (quiet, never):
        wire.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            wire.socket.recv(1)
        wire.socket.setblocking(True)
    leaving.signal()
    assert quiet.ended() and never.ended()


class Stalled:
    """The server's event loop stands still while a caller sends, as on a busy machine."""

    def __init__(self, server: PoliteServer, wires: list[Wire], then: Callable[[HotProtocol], None]) -> None:
        self._sent, self._stalls = threading.Event(), threading.Event()
        self._server, self._then = server, then
        (one,) = server._state.connections
        assert isinstance(one, HotProtocol)
        one.loop.call_soon_threadsafe(self._stall, one)
        assert self._stalls.wait(PATIENCE_S)
        wires[0].socket.sendall(message(GOOD))
        self._sent.set()

    def _stall(self, one: HotProtocol) -> None:
        self._stalls.set()
        assert self._sent.wait(PATIENCE_S)
        self._then(one)


@pytest.mark.parametrize("how", ["at the end", "after the keep-alive time"])
def test_what_lies_unread_when_a_connection_is_to_be_closed_is_answered(leaving: Leaving, how: str) -> None:
    def close(one: HotProtocol) -> None:
        if how == "at the end":
            one.close_if_idle()
        else:
            one._time_is_up()

    wire = leaving.dial()
    assert wire.ask(message(GOOD))[0] == 200
    Stalled(leaving.server, [wire], close)
    assert wire.read()[0] == 200


def test_who_connected_before_the_port_closed_is_answered_though_nobody_had_accepted_it(
    leaving: Leaving,
) -> None:
    """The event loop stands still while callers connect and ask, and the next thing that it does is to close."""
    late: list[Wire] = []
    first = leaving.dial()
    assert first.ask(message(GOOD))[0] == 200
    stalls, sent = threading.Event(), threading.Event()

    def stall() -> None:
        stalls.set()
        assert sent.wait(PATIENCE_S)
        leaving.signal()

    (one,) = leaving.server._state.connections
    leaving.signal()
    leaving.until_leaving()
    one.loop.call_soon_threadsafe(stall)
    assert stalls.wait(PATIENCE_S)
    for _ in range(20):
        late.append(leaving.dial())
        late[-1].socket.sendall(message(GOOD))
    sent.set()
    assert [wire.read()[:2] for wire in late] == [(200, True)] * 20


def test_nobody_new_gets_through_to_a_port_that_is_held_off_and_who_waits_is_still_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        waiting = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        assert polite_server.waiting_in(listener) == 3
        if not polite_server.hold_off(listener):
            pytest.skip("this system has no socket filter")
        with socket.socket() as late:
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.connect(listener.getsockname())
        for one in waiting:
            one.sendall(b"here")
            accepted, _ = listener.accept()
            assert accepted.recv(4) == b"here"
            accepted.close()
            one.close()
        assert polite_server.waiting_in(listener) == 0


@pytest.mark.parametrize("more", [{}, LONG_WAY], ids=["hot", "asgi"])
def test_what_is_still_computed_when_the_time_is_over_is_refused_with_words(
    leaving: Leaving, more: dict[str, str]
) -> None:
    leaving.roster.models["double"].holding = True
    wire = leaving.dial()
    wire.socket.sendall(message(GOOD, **more))
    until(lambda: len(leaving.roster.models["double"].held) == 1)
    leaving.server.config.timeout_graceful_shutdown = 0.1  # pyright: ignore[reportAttributeAccessIssue]
    leaving.signal()
    leaving.signal()
    status, closes, body = wire.read()
    assert (status, closes) == (503, True) and "shutting down" in json.loads(body)["error"]
    assert wire.ended()


SCRIPT = """
import os, sys, uvicorn
from halfeven.serve.http.connection.polite_protocol import PoliteProtocol
from halfeven.serve.http.connection.polite_server import PoliteServer

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        print("ended in order", flush=True)
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["path"] == "/stuck":
        import asyncio
        await asyncio.Event().wait()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})

class Server(PoliteServer):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

    def handle_exit(self, sig, frame):
        super().handle_exit(sig, frame)
        os.write(1, b"heard\\n")

config = uvicorn.Config(app, port=0, http=PoliteProtocol, loop="uvloop", log_level="error", lifespan="on")
Server(config, grace_s=float(sys.argv[1])).run()
print("left", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "grace_s", "stuck", "code"),
    [
        ([signal.SIGTERM], 0.0, False, 0),
        ([signal.SIGINT], FOREVER_S, False, 0),  # Ctrl-C waits for no load balancer
        ([signal.SIGTERM, signal.SIGTERM], FOREVER_S, False, 0),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], FOREVER_S, True, -signal.SIGTERM),
    ],
    ids=["SIGTERM", "Ctrl-C", "two", "three"],
)
def test_a_process_ends_with_0_where_it_ended_in_order(
    tmp_path: Path, signals: list[int], grace_s: float, stuck: bool, code: int
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), str(grace_s)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        wire = Wire(int(process.stdout.readline()))
        if stuck:
            wire.socket.sendall(get("/stuck"))
        else:
            assert wire.ask(get("/"))[:2] == (200, False)
        for number in signals:  # one by one: a process sees that a signal came, not how often
            process.send_signal(number)
            assert process.stdout.readline() == "heard\n"
        assert process.wait(PATIENCE_S) == code
        assert process.stdout.read() == ("" if code else "ended in order\nleft\n")
        wire.close()
