"""No process of ours opens a connection beyond this machine, or writes a file that nobody asked for: whatever the
environment says, through the demo, conversion, serving and a job."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from halfeven.models.telemetry import OFF
from safetensors.numpy import save_file

from tests.leaving import COMPILER, Watch, watch
from tests.model_folders import write_folder
from tests.preloaded import FEW_UNSEEN

needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs a C compiler on Linux (apt install gcc)"
)
DOORS = (
    "import halfeven",
    "import halfeven.serve.cli.main",
    "import halfeven.serve.finetune.training.trainer",
)
RUNS = 5
SLOW = Path(__file__).parent / "benchmarks/slow_half"  # FP16 convolutions take SLOW_HALF times as long
COMMANDS = f"""
import json, sys
from halfeven.exporters.plan import rehearsal
from halfeven.serve.cli.main import app

rehearsal.UNSEEN = rehearsal.UNSEEN_ALONE = {FEW_UNSEEN}
for words in json.loads(sys.argv[1]):
    try:
        app(words)
    except SystemExit as end:
        assert end.code in (None, 0, 3), words
"""


@pytest.fixture
def watched(tmp_path: Path) -> Watch:
    return watch(tmp_path)


@needs_compiler
def test_the_watch_sees_connections_names_and_files(watched: Watch) -> None:
    fault = "import socket\ntry: {}\nexcept OSError: pass"
    asking = ("socket.create_connection(('192.0.2.1', 9))", "socket.getaddrinfo('collector.example', 443)")
    for one in (*asking, "socket.socket(2, 2).sendto(b'x', ('192.0.2.2', 9))"):
        watched.run(sys.executable, "-c", fault.format(one))
    watched.run(sys.executable, "-c", "import pathlib; (pathlib.Path.home() / 'id').touch()")
    seen = [line.partition(" (")[0] for line in watched.asked_for()]
    assert seen == ["connect 192.0.2.1", "getaddrinfo collector.example", "sendto 192.0.2.2"]
    assert watched.written() == ["home/id"]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("door", DOORS)
def test_every_door_switches_telemetry_off_whatever_the_environment_says(watched: Watch, door: str) -> None:
    libraries = (
        "from ray._common.usage import usage_lib as ray\n"
        "from huggingface_hub import constants as hub\n"
        "print(ray.usage_stats_enabled(), hub.HF_HUB_DISABLE_TELEMETRY, hub.HF_HUB_DISABLE_UPDATE_CHECK)\n"
    )
    shown = f"{door}\nimport os\nprint(sorted(set({OFF!r}.items()) - set(os.environ.items())))\n{libraries}"
    done = watched.run(sys.executable, "-c", shown)
    assert done.stdout.splitlines() == ["[]", "False True True"], done.stderr


@pytest.mark.slow
@needs_compiler
def test_a_program_that_uses_the_runtime_before_halfeven_sends_nothing_afterwards(watched: Watch) -> None:
    shown = "import onnxruntime, halfeven, os, pathlib\nlog = pathlib.Path(os.environ['LEAVING_LOG'])\n"
    shown += "print(log.exists() and log.stat().st_size)\nimport halfeven.exporters.onnx.runtime"
    for _ in range(RUNS):
        done = watched.run(sys.executable, "-c", shown)
        assert done.returncode == 0, done.stderr
        if done.stdout in ("False\n", "0\n"):  # else the runtime had sent before halfeven was there
            assert watched.asked_for() == []
            return
        (watched.place / "leaving.log").unlink()
    pytest.skip(f"in each of {RUNS} runs the runtime sent something before halfeven was imported")


@needs_compiler
@pytest.mark.slow(seconds=60)  # the whole demo, then a server and commands on its store
def test_nothing_leaves_in_conversion_serving_and_a_job_and_the_demo_shows_the_scaler_where_fp16_is_slow(
    watched: Watch, tmp_path: Path
) -> None:
    """The demo converts in both forms, serves and trains; the other commands ask a server of its store."""
    paths = os.pathsep.join(filter(None, [str(SLOW), os.environ.get("PYTHONPATH", "")]))
    slow = replace(watched, environment={**watched.environment, "SLOW_HALF": "2", "PYTHONPATH": paths})
    store, given, one = tmp_path / "store", tmp_path / "given", tmp_path / "one.safetensors"
    demo = json.dumps([["demo", "--json", "--store", str(store)]])
    done = slow.run(sys.executable, "-c", COMMANDS, demo, seconds=600)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    job = facts["job"]["summary"]
    assert facts["passed"] and facts["precision"] == "fp16"
    assert job["precision"] == "fp16_emulated" and job["steps"] > 100
    assert job["skipped"] > 0 and job["scale_min"] < job["scale_max"]
    assert {one["status"] for one in facts["versions"]} == {"live"}
    save_file({"image": np.zeros((1, 1, 8, 8), np.float32)}, one)
    folder = write_folder(tmp_path / "net")
    with watched.serving("--store", str(store), "--grpc-port", "0") as url:
        commands = [
            ["predict", "digits", str(one), "--url", url],
            ["bench", url, "digits", "--seconds", "1", "--concurrency", "1"],
            ["export", "digits", "--for", "onnxruntime", str(given), "--store", str(store)],
            ["init", str(store / "models/digits/1/original.onnx"), str(tmp_path / "bare")],
            ["convert", str(folder), "--form", "torch", "--store", str(tmp_path / "other")],
            ["doctor"],
        ]
        done = watched.run(sys.executable, "-c", COMMANDS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    assert (watched.asked_for(), watched.written()) == ([], [])
