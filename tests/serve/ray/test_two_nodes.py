"""Two nodes of a local Ray cluster serve one half under load, while versions roll and replicas and nodes die.

``HALFEVEN_RAY=100000`` asks so many times, replaces every replica, and kills ten replicas and three nodes; every run
asks some thousand times and kills one each.
"""

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.store.store import Store
from halfeven.serve.access import direct_requests
from halfeven.serve.access.direct_requests import ask

from tests.model_folders import LINEAR
from tests.serve.ray.callers import Callers, Expected
from tests.serve.ray.conftest import SEEDS
from tests.serve.ray.nodes import SECONDS, two_nodes, until

pytestmark = [
    pytest.mark.slow(seconds=10),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: halfeven[ray]"),
]
ASKED = int(os.environ.get("HALFEVEN_RAY", "0"))
CALLERS = 8
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
    sent, once = list[str](), direct_requests.answer_to
    monkeypatch.setattr(
        direct_requests, "answer_to", lambda url, *more: (sent.append(url), once(url, *more))[1]
    )
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
