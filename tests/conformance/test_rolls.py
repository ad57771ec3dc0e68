"""A server is rolled by SIGTERM behind a proxy that follows readiness: every request is answered, and rightly.

``HALFEVEN_ROLLS=50`` rolls so many times (about six seconds each on a calm machine).
"""

import json
import os
import shutil
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.conformance.conftest import ONES, SIMPLE, Serving, launched
from tests.conformance.following_proxy import FollowingProxy, following
from tests.patience import PATIENCE_S

ROLLS = int(os.environ.get("HALFEVEN_ROLLS", "2"))
CALLERS = 3
PAUSE_S = 0.005  # between two requests of a caller: the server that starts needs the processor too
SECONDS = PATIENCE_S


class Caller(threading.Thread):
    """A caller that asks one thing after another on a kept connection, each with numbers of its own."""

    def __init__(self, number: int, port: int, end: threading.Event) -> None:
        super().__init__()
        self._number, self._port, self._end = number, port, end
        self.answered, self.wrong = 0, list[str]()

    def run(self) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=SECONDS, verify=False) as client:
            while not self._end.wait(PAUSE_S):
                self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        first = [self._number * 1_000_000 + self.answered + place for place in range(16)]
        given = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": first}
        try:
            answer = client.post(SIMPLE, content=json.dumps({"inputs": [given, ONES]}))
            outputs = {one["name"]: one["data"] for one in answer.json()["outputs"]}
            is_right = outputs["OUTPUT0"] == [number + 1 for number in first]
        except Exception as error:
            is_right, answer = False, error
        if not is_right:
            self.wrong.append(repr(answer))
        self.answered += 1


def roll(old: Serving, new: Serving, proxy: FollowingProxy) -> None:
    """The new server takes over once it is ready; the old one is told to end, and does."""
    proxy.add(new.address)
    wait_until_ready(proxy, new)
    sent = proxy.sent[old.address]
    old.process.send_signal(signal.SIGTERM)
    assert old.process.wait(SECONDS) == 0
    assert sent > 0, "the old server was under load"
    assert not proxy.is_ready(old.address)
    proxy.remove(old.address)


def wait_until_ready(proxy: FollowingProxy, server: Serving) -> None:
    for _ in range(SECONDS * 20):
        if proxy.is_ready(server.address):
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{server.address} did not become ready")


@pytest.mark.slow
def test_nothing_is_lost_when_a_server_is_rolled_by_sigterm(hosted: Path, tmp_path: Path) -> None:
    stores = [tmp_path / "even", tmp_path / "odd"]  # a store has one server
    for store in stores:
        shutil.copytree(hosted / "models/simple", store / "models/simple")

    def start(number: int) -> Serving:
        return stack.enter_context(launched(stores[number % 2], ["simple"], drain_seconds=0.5))

    end = threading.Event()
    with following() as proxy, ExitStack() as stack:
        server = start(0)
        proxy.add(server.address)
        wait_until_ready(proxy, server)
        callers = [Caller(number, proxy.port, end) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        try:
            for number in range(ROLLS):
                new = start(number + 1)
                roll(server, new, proxy)
                server = new
        finally:
            end.set()
            for caller in callers:
                caller.join(SECONDS)
    asked = sum(caller.answered for caller in callers)
    print(f"{ROLLS} rolls, {asked} requests, {len(proxy.lost)} lost")
    assert proxy.lost == []
    assert [wrong for caller in callers for wrong in caller.wrong] == []
    assert asked == sum(proxy.sent.values()) and len(proxy.sent) == ROLLS + 1
