"""Two nodes of a local Ray cluster serve one half under load, while versions roll and replicas and nodes die.

``HALFEVEN_RAY=100000`` asks so many times, replaces every replica, and kills ten replicas and three nodes; every run
asks some thousand times and kills one each.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.store import Store
from halfeven.serve.cli import asking
from halfeven.serve.cli.asking import ask

from tests.model_folders import LINEAR
from tests.patience import PATIENCE_S
from tests.serve.ray.callers import Callers, Expected
from tests.serve.ray.conftest import SEEDS

pytestmark = [
    pytest.mark.slow(seconds=10),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: halfeven[ray]"),
]
ASKED = int(os.environ.get("HALFEVEN_RAY", "0"))
CALLERS = 8
SECONDS = PATIENCE_S
KILLS = (
    (3 * (3 * ["kill_replica"] + ["kill_node"]) + ["kill_replica"])
    if ASKED
    else ["kill_replica", "kill_node"]
)
DEPLOYMENT = {
    "max_replicas_per_node": 1,
    "ray_actor_options": {"num_cpus": 0.5},
    "autoscaling_config": {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0,
        "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 1,
    },
}  # fmt: skip


class Cluster:
    """The process of `cluster.py`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process, self.url = process, url
        assert self._said() == "up"

    def do(self, order: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster's process ended"
        return json.loads(line)


@contextmanager
def two_nodes(options: dict[str, Any], log: Path) -> Iterator[Cluster]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.serve.ray.cluster", str(port), json.dumps(options)]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            cwd=Path(__file__).parents[3], start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield Cluster(process, f"http://127.0.0.1:{port}")
        except BaseException:
            sys.stderr.write(log.read_text()[-8000:])
            raise
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def until(holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, what
        threading.Event().wait(0.1)
    return time.monotonic() - began


def expected(store: Path) -> dict[str, Expected]:
    found = {}
    for number, seed in SEEDS.items():
        names: dict[str, Any] = {}
        exec(LINEAR.replace("manual_seed(5)", f"manual_seed({seed})"), names)
        digest = Store(store).version("net", number).manifest["files"]["half.pt2"]
        found[str(number)] = Expected(names["build"]().eval(), digest)
    return found


def roll(callers: Callers, order: str, version: int) -> None:
    """One order to one replica; the other one follows."""
    ask(f"{callers.url}/v1/models/net/{order}", json.dumps({"version": version}).encode(), "application/json")
    callers.newest.clear()
    lag = until(lambda: set(callers.newest.values()) == {str(version)}, f"version {version} everywhere")
    print(f"{order}: version {version} everywhere {lag:.1f} s after the reply")


def test_every_request_is_answered_while_versions_roll_and_replicas_and_nodes_die(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = shutil.copytree(converted, tmp_path / "store")
    sent, once = list[str](), asking.answer_to
    monkeypatch.setattr(asking, "answer_to", lambda url, *more: (sent.append(url), once(url, *more))[1])
    options = {"store": str(mine), "cache": str(tmp_path / "copy"), "deployment": DEPLOYMENT}
    options["settings"] = {"expose_without_auth": True}
    began = time.monotonic()
    with two_nodes(options, tmp_path / "log") as cluster:
        print(f"up after {time.monotonic() - began:.0f} s")
        callers = Callers(cluster.url, expected(mine))
        assert cluster.do("replicas") == 1
        with callers.calling(CALLERS):
            scaled = until(lambda: len(callers.by_node) == 2, "two nodes answer")
            print(f"1 → 2 replicas by load in {scaled:.0f} s")
            roll(callers, "promote", 2)
            roll(callers, "rollback", 1)
            for place, kill in enumerate(KILLS, 1):
                cluster.do(kill)
                least = max(callers.answered + 200, ASKED * place // len(KILLS))
                if kill == "kill_node" and place < len(KILLS):
                    cluster.do("add_node")
                    known = len(callers.by_node)
                    until(lambda known=known: len(callers.by_node) > known, "the new node answers")
                until(lambda least=least: callers.answered >= least, f"answers after {kill}", SECONDS + ASKED)
                print(f"{kill}: {callers.answered} answered, {len(callers.lost)} lost", flush=True)
        down = until(lambda: cluster.do("replicas") == 1, "one replica without load")
        print(f"2 → 1 replicas in {down:.0f} s")
    again = sum(url.endswith("/infer") for url in sent) - callers.asked
    print(
        f"asked {callers.asked}: answered {callers.answered}, refused {callers.refused}, sent again {again}"
    )
    print(f"by node {dict(callers.by_node)}; {time.monotonic() - began:.0f} s")
    assert callers.wrong == []
    assert callers.lost == []
    assert again > 0 or not ASKED, "no kill met a request: nothing was shown"
