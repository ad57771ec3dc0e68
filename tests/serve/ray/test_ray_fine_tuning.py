"""A fine-tuning job for an application on Ray Serve: what it makes is published in the application's store.

All but the last one without a cluster: the writer that a job asks runs here.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadSetting, NotReady, UnknownName
from halfeven.models.store.store import REFUSED, Store
from halfeven.serve.access.client_key import VARIABLE
from halfeven.serve.access.direct_requests import ask
from halfeven.serve.access.keys import NAME_IN_STORE, KeyFile
from halfeven.serve.finetune.client.job_command import exit_code, fine_tune, sentence_of
from halfeven.serve.finetune.jobs.concluding import FINE_TUNING
from safetensors.numpy import save_file

from tests.patience import PATIENCE_S
from tests.serve.ray.handle import Handle
from tests.serve.ray.nodes import two_nodes, until

pytestmark = [
    pytest.mark.slow(seconds=10),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: halfeven[ray]"),
]
SETTINGS = {"n_epochs": 20, "batch_size": 16, "learning_rate": 0.02, "precision": "fp16"}
X = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
def source(converted: Path, tmp_path: Path) -> Store:
    """Version 1 is active, version 2 is not, and there is a key."""
    store = Store(shutil.copytree(converted, tmp_path / "store"))
    KeyFile(store.root / NAME_IN_STORE).add("first", ["infer"])
    return store


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Path, Path]:
    """Rows to learn from, and others to judge by."""
    draw = np.random.default_rng()
    paths = tmp_path / "learn.safetensors", tmp_path / "judge.safetensors"
    for path, count in zip(paths, (256, 64), strict=True):
        x = draw.standard_normal((count, 4)).astype(np.float32)
        save_file({"x": x, "target:y": np.ascontiguousarray(x[:, :3] * 2 + 1)}, path)
    return paths


@contextmanager
def server_for(source: Store, model: str = "net") -> Iterator[Any]:
    from halfeven.serve.ray import Options
    from halfeven.serve.ray.fine_tuning import own_server
    from halfeven.serve.ray.one_writer import OneWriter, RemoteWriter

    writer = OneWriter(Options(store=str(source.root)))
    handle: Any = Handle(writer)
    handle.source = SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda timeout_s: writer.source()))
    try:
        with own_server(RemoteWriter(handle, lambda: None), model) as server:
            yield server
    finally:
        writer._lock.close()


def trained(server: Any, rows: tuple[Path, Path], model: str = "net", judged: bool = True) -> dict[str, Any]:
    """The facts of a job at its end."""
    learn, judge = rows
    return fine_tune(
        server.url, model, learn, validation=judge if judged else None, seed=7, hyperparameters=SETTINGS,
        notify=lambda line: None,
    )  # fmt: skip


def test_what_a_job_makes_is_published_and_made_active_by_the_one_writer(
    source: Store, rows: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "of somebody")
    with server_for(source) as server:
        facts = trained(server, rows)
        assert source.numbers("net") == [1, 2], "nothing is in the application's store before it is published"
        shutil.copytree(source.root / "models/net/2", source.root / "models/net/3")  # the number is taken
        facts = server.published(facts)
    assert facts["fine_tuned_model"] == "net@4" and exit_code(facts) == 0
    assert sentence_of(facts).startswith("net@4 is active; on the held-out rows ")
    version = source.version("net", 4)
    assert all(version.opened(file).close() is None for file in version.manifest["files"])
    assert version.manifest["lineage"]["job"] == facts["job"] and version.manifest["parent"] == 1
    assert source.live_number("net") == 4
    assert source.promotions("net")[4]["last"]["by"] == FINE_TUNING
    assert os.environ[VARIABLE] == "of somebody"
    assert KeyFile(source.root / NAME_IN_STORE).read() is not None, "the keys are the application's"


def test_where_another_version_became_active_meanwhile_the_job_s_own_is_published_only(
    source: Store, rows: tuple[Path, Path]
) -> None:
    with server_for(source) as server:
        facts = trained(server, rows)
        source.promote(source.version("net", 2))
        facts = server.published(facts)
    assert source.numbers("net") == [1, 2, 3] and source.live_number("net") == 2
    assert exit_code(facts) == 3 and facts["error"]["code"] == "STALE_PARENT"
    assert "net@3 was to take the place of version 1, but version 2 is active" in sentence_of(facts)


def test_what_no_set_judged_is_published_and_held(source: Store, rows: tuple[Path, Path]) -> None:
    with server_for(source, "net@1") as server:
        facts = trained(server, rows, "net@1", judged=False)
        shutil.copytree(source.root / "models/net/2", source.root / "models/net/3")
        facts = server.published(facts)
    assert source.numbers("net") == [1, 2, 3, 4] and source.live_number("net") == 1
    assert exit_code(facts) == 3 and facts["promotion"]["state"] == "held"
    words = sentence_of(facts)
    assert words.startswith("net@4 is published and held") and "`halfeven promote net@4`" in words
    assert '{"version": 4}' in words and "net@3" not in words


def test_of_a_job_that_made_no_version_or_a_refused_one_nothing_is_published(source: Store) -> None:
    error = {"code": "METRIC_REGRESSED", "message": "it forgot"}
    facts = {"job": "ftjob-1", "status": "failed", "error": error, "gate": None, "page": "http://gone"}
    with server_for(source) as server:
        assert server.published(facts) == {**facts, "page": None}
        with server._own.draft("net") as draft:
            shutil.copytree(source.version("net", 2).folder, draft.folder, dirs_exist_ok=True)
            draft.publish(REFUSED, {**source.version("net", 2).manifest, "lineage": {"job": "ftjob-1"}})
        facts = server.published(facts)
    assert source.numbers("net") == [1, 2] and source.live_number("net") == 1
    assert sentence_of(facts) == "job ftjob-1 failed: it forgot"


def test_the_server_of_a_job_is_closed_to_others_and_a_model_that_is_not_there_is_named(
    source: Store,
) -> None:
    with server_for(source) as server:
        key = os.environ.pop(VARIABLE)
        with pytest.raises(Exception, match="key"):
            ask(f"{server.url}/v2", None)
        os.environ[VARIABLE] = key
        assert json.loads(ask(f"{server.url}/v2", None)[1])["name"] == "halfeven"
    with (
        pytest.raises(UnknownName, match=r"no model 'nte' in the store .*: \['net'\]"),
        server_for(source, "nte"),
    ):
        pass


def test_a_store_that_is_no_folder_and_a_command_outside_of_a_cluster_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from halfeven.serve.ray.fine_tuning import connected, own_server

    with (
        pytest.raises(BadSetting, match="memory://store, and a job publishes into a folder"),
        own_server(SimpleNamespace(source=lambda: "memory://store"), "net"),  # type: ignore[arg-type]
    ):
        pass
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(NotReady, match="RAY_ADDRESS, which names the cluster, is not set"),
        connected("default"),
    ):
        pass


def test_replicas_take_up_what_a_job_on_the_cluster_made(
    source: Store, rows: tuple[Path, Path], tmp_path: Path
) -> None:
    """The command as `ray job submit` starts it: a process on a node, with the address of the cluster."""
    options = {"store": str(source.root), "cache": str(tmp_path / "copy")}
    options |= {
        "settings": {"expose_without_auth": True},
        "deployment": {"ray_actor_options": {"num_cpus": 0.5}},
    }
    (source.root / NAME_IN_STORE).unlink()
    learn, judge = rows
    with two_nodes(options, tmp_path / "log") as cluster:
        command = [sys.executable, "-m", "halfeven.serve.cli.main", "finetune", "net", "--data", str(learn)]
        command += ["--validation", str(judge), "--seed", "7", "--ray", "default", "--json"]
        for name, value in SETTINGS.items():
            command += ["--set", f"{name}={value}"]
        environment = {**os.environ, "RAY_ADDRESS": cluster.do("address"), "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr[-4000:]
        facts = json.loads(done.stdout.splitlines()[-1])
        assert facts["fine_tuned_model"] == "net@3"

        def version() -> str:
            return ask(f"{cluster.url}/v2/models/net/infer", json.dumps(X).encode())[0]["halfeven-version"]

        until(lambda: version() == "3", "a replica answers with the version that the job made")
    assert source.live_number("net") == 3
