"""Rolls under real callers: versions swapped, models loaded again, servers restarted. No request goes unanswered."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from halfeven.serve.versions.traffic import loaded_version

from tests.patience import PATIENCE_S, until
from tests.serve.conftest import started
from tests.serve.versions.traffic.conftest import Versions, call
from tests.slow import by_name

pytestmark = pytest.mark.slow  # servers and callers for many seconds

CALLERS = 6


class Caller:
    """One thread that asks as fast as it is answered, on a connection that it keeps until it is told that it ends."""

    def __init__(self, port: int, path: str, more: dict[str, str]) -> None:
        self.statuses: Counter[int] = Counter()
        self.lost: list[str] = []
        self.refusals: set[str] = set()
        self._port, self._path, self._headers = port, path, more
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        row = np.random.default_rng(self._port).standard_normal(4)
        tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": row.tolist()}
        body = json.dumps({"inputs": [tensor]})
        while not self.over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            try:
                connection.connect()
            except ConnectionRefusedError:  # nothing was asked: the next server is on its way
                self.over.wait(0.002)
                continue
            self._ask_until_closing(connection, body)
            connection.close()

    def _ask_until_closing(self, connection: http.client.HTTPConnection, body: str) -> None:
        reply = False
        while not reply and not self.over.is_set():
            try:
                connection.request("POST", self._path, body, self._headers)
                answer = connection.getresponse()
                words = answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(f"{type(error).__name__}: {error}")
                return
            self.statuses[answer.status] += 1
            reply = answer.headers["connection"] == "close"
            if answer.status != 200:
                self.refusals.add(words)


class Life:
    """A server that is started again on the same port and store."""

    def __init__(self, store: Store) -> None:
        self._store, self._stack, self.port = store, ExitStack(), 0
        self.start()

    def start(self) -> None:
        settings = read_settings(store=self._store.root, device="cpu", keep_previous_seconds=0.0)
        app, self.roster = build(settings, self._store)
        own = started(
            app, port=self.port, seconds=30, grace_s=0.02, on_leaving=self.roster.leave, quiet_s=0.25
        )
        server = self._stack.enter_context(own)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.roster.wait(PATIENCE_S)

    def stop(self) -> None:
        self._stack.close()

    def order(self, path: str, asked: Any) -> None:
        status, said = call(f"127.0.0.1:{self.port}", path, asked)
        assert status == 200, said


@contextmanager
def callers(port: int) -> Iterator[list[Caller]]:
    """Callers: some straight from the parser, some through ASGI, some of one version by its number or its label."""
    ways = [("", {}), ("", {"X-Request-Id": "me"}), ("/versions/stable", {})]
    each = [ways[number % len(ways)] for number in range(CALLERS)]
    asking = [Caller(port, f"/v2/models/net{version}/infer", more) for version, more in each]
    for one in asking:
        one.thread.start()
    try:
        yield asking
    finally:
        for one in asking:
            one.over.set()
        for one in asking:
            one.thread.join(PATIENCE_S)


def rolls_of(life: Life, rolls: int) -> Iterator[Callable[[], None]]:
    """Swaps, reloads and restarts in turn."""

    def restart() -> None:
        life.stop()
        life.start()

    for number in range(rolls):
        if number % 5 == 4:
            yield restart
        elif number % 2:
            rows = 2 + number % 7
            config = {"parameters": {"config": json.dumps({"max_batch_size": rows})}}
            yield lambda config=config: life.order("/v2/repository/models/net/load", config)
        else:
            version = {"version": 1 + number // 2 % 3}
            yield lambda version=version: life.order("/v1/models/net/promote", version)


@pytest.mark.parametrize("rolls", [5, by_name(50)])
def test_no_request_is_lost_while_versions_models_and_servers_come_and_go(
    store: Store, versions: Versions, rolls: int
) -> None:
    life = Life(store)
    rolled = 0
    with callers(life.port) as asking:
        for roll in rolls_of(life, rolls):
            before = [sum(one.statuses.values()) for one in asking]
            roll()
            rolled += 1
            until(
                lambda before=before: all(
                    sum(o.statuses.values()) > b for o, b in zip(asking, before, strict=True)
                )
            )
    life.stop()
    assert rolled == rolls
    assert [one.lost for one in asking] == [[]] * CALLERS
    statuses = sum((one.statuses for one in asking), Counter())
    starting = {words for one in asking for words in one.refusals if "being made ready" not in words}
    assert starting == set(), "a server that starts may say so; nothing else is refused"
    assert statuses[200] > rolls and set(statuses) <= {200, 503}


def body_of(count: int) -> bytes:
    tensor = {"name": "x", "shape": [count, 4], "datatype": "FP32", "data": [1.0] * 4 * count}
    return json.dumps({"inputs": [tensor]}).encode()


@pytest.fixture
def life(store: Store, versions: Versions) -> Iterator[Life]:
    own = Life(store)
    yield own
    own.stop()


@pytest.mark.parametrize(
    ("how", "path"),
    [("load", "/v2/models/net/versions/1/infer"), ("unload and load", "/v2/models/net/infer")],
    ids=["load", "unload and load"],
)
@pytest.mark.parametrize("more", ["", "X-Request-Id: me\r\n"], ids=["short way", "long way"])
def test_a_body_that_was_on_its_way_while_its_version_was_loaded_again_is_answered(
    life: Life, path: str, how: str, more: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", life.port, timeout=PATIENCE_S)
    connection.connect()
    body = body_of(1)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode()
    connection.sock.sendall(head + body[:10])
    assert call(f"127.0.0.1:{life.port}", "/v1/models")[0] == 200  # the head was read before this was
    if how != "load":
        life.order("/v2/repository/models/net/unload", {})
    life.order("/v2/repository/models/net/load", {"parameters": {"config": '{"max_batch_size": 4}'}})
    connection.sock.sendall(body[10:])
    answer = http.client.HTTPResponse(connection.sock)
    answer.begin()
    assert answer.status == 200, answer.read()
    assert json.loads(answer.read())["model_version"] == "1"
    answer.close()
    connection.close()


def test_what_waits_longer_than_a_drain_may_take_is_answered_all_the_same(
    life: Life, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_version, "DRAIN_SECONDS", 0.05)
    device = life.roster.place.thread
    device.hold()
    connection = http.client.HTTPConnection("127.0.0.1", life.port, timeout=PATIENCE_S)
    connection.request("POST", "/v2/models/net/infer", body_of(1))
    until(lambda: life.roster.all()[0].loaded_versions()[0].waiting == 1)
    engine = versions.halves[1]
    life.order("/v2/repository/models/net/unload", {})
    assert not engine.closed
    device.release()
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["halfeven-version"] == "1"
    until(lambda: engine.closed)
    connection.close()
