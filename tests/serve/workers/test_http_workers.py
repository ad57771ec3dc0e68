"""A real server with HTTP workers: processes die under load, and every request is answered rightly or refused.

``HALFEVEN_KILLS=50`` kills so many processes, half of them the engine process; otherwise three.
"""

import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from halfeven.models.store import Store
from halfeven.serve.access.key_file import NAME_IN_STORE, KeyFile

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving, launched
from tests.conformance.hosted import MODELS, host
from tests.kept import kept_store
from tests.patience import PATIENCE_S
from tests.slow import KILLS

SECONDS = PATIENCE_S
CALLERS = 4
GOOD = json.dumps({"inputs": [COUNTING, ONES]})
ROWS = 8  # in every tenth request


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        host(Store(folder / "store"), folder / "models", {"simple": MODELS["simple"]})

    return Path(
        shutil.copytree(kept_store(__file__, make) / "store", tmp_path_factory.mktemp("workers") / "store")
    )


@contextmanager
def started(store: Path, **settings: Any) -> Iterator[Serving]:
    with launched(store, ["simple"], http_workers=2, **settings) as server:
        yield server


class Caller(threading.Thread):
    """Asks one thing after another, each with numbers of its own. A connection that breaks is made anew."""

    def __init__(self, number: int, address: str, end: threading.Event) -> None:
        super().__init__()
        self._number, self._end = number, end
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._connection: http.client.HTTPConnection | None = None
        self.kinds: Counter[str] = Counter()
        self.faults: list[str] = []
        self.last_right_s = 0.0

    def run(self) -> None:
        while not self._end.is_set():
            kind = self._ask(self.kinds.total())
            self.kinds[kind] += 1
            if kind == "right":
                self.last_right_s = time.monotonic()
            else:
                self._end.wait(0.02)
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, asked: int) -> str:
        rows = ROWS if asked % 10 == 9 else 1
        first = [self._number * 10_000_000 + asked * 1000 + place for place in range(16 * rows)]
        ones = [1] * len(first)
        fields = {"shape": [len(first) // 16, 16], "datatype": "INT32"}
        body = json.dumps({"inputs": [{"name": "INPUT0", **fields, "data": first},
                                      {"name": "INPUT1", **fields, "data": ones}]})  # fmt: skip
        began = time.monotonic()
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)
            self._connection.request("POST", SIMPLE, body)
            answer = self._connection.getresponse()
            status, headers, text = answer.status, answer.headers, answer.read()
        except TimeoutError:
            self.faults.append(f"hung for {time.monotonic() - began:.0f} s")
            self._drop()
            return "hung"
        except (OSError, http.client.HTTPException):  # the worker of this connection was killed
            self._drop()
            return "connection lost"
        if status == 503 and headers["retry-after"]:
            return "503"
        right = status == 200 and json.loads(text)["outputs"][0]["data"] == [number + 1 for number in first]
        if not right:
            self.faults.append(f"{status}: {text[:200]!r} for {first[:2]}…")
        return "right" if right else "wrong"


def until_all_are_answered(callers: list[Caller], since_s: float) -> None:
    for _ in range(SECONDS * 50):
        if all(caller.last_right_s > since_s for caller in callers):
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"no right answer for {SECONDS} s: {[(one.kinds, one.faults) for one in callers]}")


@pytest.mark.slow
def test_killed_workers_and_a_killed_engine_process_leave_no_request_without_an_answer(store: Path) -> None:
    kills, chance = KILLS or 3, random.Random(os.environ["HALFEVEN_TEST_SEED"])
    killed: Counter[str] = Counter()
    end = threading.Event()
    with started(store) as server:
        callers = [Caller(number, server.address, end) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        try:
            for number in range(kills):
                until_all_are_answered(callers, time.monotonic())
                which = (
                    "halfeven-engine" if number % 2 else chance.choice(["halfeven-http-1", "halfeven-http-2"])
                )
                (pid,) = server.children()[which]
                end.wait(chance.random() * 0.2)
                os.kill(pid, signal.SIGKILL)
                killed[which] += 1
                if number % 2:  # every request until then is refused with a 503, or waits for its answer
                    is_alive = httpx.get(
                        f"http://{server.address}/v2/health/live", timeout=SECONDS
                    ).status_code
                    assert is_alive == 200
            until_all_are_answered(callers, time.monotonic())
        finally:
            end.set()
            for caller in callers:
                caller.join(2 * SECONDS)
        page = httpx.get(f"http://{server.address}/metrics", timeout=SECONDS).text
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0
    kinds = sum((caller.kinds for caller in callers), Counter[str]())
    print(f"killed {dict(killed)}; requests {dict(kinds)}")
    assert [fault for caller in callers for fault in caller.faults] == []
    assert f"halfeven_engine_starts {killed['halfeven-engine'] + 1}.0" in page
    assert kinds["right"] > kills * CALLERS and kinds["503"] > 0 and kinds["connection lost"] > 0


@pytest.mark.slow
def test_the_end_of_the_parent_ends_every_process_and_leaves_nothing_behind(store: Path) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    with started(store) as server:
        pids = server.pids[1:]
        os.kill(server.process.pid, signal.SIGKILL)
        for _ in until(lambda: not any(map(runs, pids))):
            pass
        assert sorted(Path("/dev/shm").iterdir()) == before


@pytest.mark.slow
def test_a_stray_signal_ends_no_process_and_a_process_that_starts_anew_asks_for_keys_as_before(
    store: Path,
) -> None:
    """The key file is gone when they start: only a new start of the whole server may serve without keys again."""
    keys = KeyFile(store / NAME_IN_STORE)
    with started(store) as server, server.client() as client:
        running = server.children()
        assert sorted(running) == ["halfeven-engine", "halfeven-http-1", "halfeven-http-2"]
        for pid in server.pids[1:]:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert ask(client) == 200
        secret, _ = keys.add("one", scopes=("infer",))
        while (status := ask(client)) == 200:
            threading.Event().wait(0.02)
        assert status == 401 and ask(client, Authorization=f"Bearer {secret}") == 200
        keys.path.unlink()
        for pid in server.pids[1:]:
            os.kill(pid, signal.SIGKILL)
        statuses = {ask(client) for _ in until(lambda: engine_is_back(server, running))}
        assert statuses <= {0, 401, 503}
        assert {ask(client) for _ in range(50)} == {401}


def ask(client: httpx.Client, **headers: str) -> int:
    """The status; 0 where the connection was lost."""
    try:
        return client.post(SIMPLE, content=GOOD, headers=headers).status_code
    except httpx.TransportError:
        return 0


def engine_is_back(server: Serving, before: dict[str, list[int]]) -> bool:
    with suppress(httpx.TransportError):
        new = server.children().get("halfeven-engine") not in (None, before["halfeven-engine"])
        return new and httpx.get(f"http://{server.address}/v2/health/ready").status_code == 200
    return False


def until(is_so: Callable[[], bool]) -> Iterator[None]:
    for _ in range(SECONDS * 20):
        yield
        if is_so():
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"not so after {SECONDS} s")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "traces"),
        ({"HALFEVEN_DEVICE": "cuda:99"}, "cuda:99"),
    ],
)
def test_what_cannot_start_is_refused_in_a_sentence_and_leaves_no_process(
    store: Path, more: dict[str, str], words: str
) -> None:
    asked = [sys.executable, "-m", "halfeven.serve.cli.main", "serve", "--store", str(store), "--port", "0"]
    environment = {**os.environ, "HALFEVEN_HTTP_WORKERS": "2", **more}
    ended = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=2 * SECONDS)
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr and "Traceback" not in ended.stderr
