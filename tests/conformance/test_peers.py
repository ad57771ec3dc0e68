"""Other projects' clients, unchanged, against the server: each reads the same answers. `make peers` fetches them.

`peers/*.py` drive them, each in a process of its own (what they import is theirs); what they read comes back as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import Serving
from tests.conformance.outside_clients import PEERS, WITHOUT_PEERS
from tests.patience import PATIENCE_S

pytestmark = WITHOUT_PEERS
TWICE = [2 * number for number in range(16)]
NOUGHT = [0] * 16


def read_by(client: str, address: str) -> Any:
    script = Path(__file__).parent / "peers" / f"{client}_client.py"
    done = subprocess.run(
        [sys.executable, str(script), address],
        env={**os.environ, "PYTHONPATH": str(PEERS)}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_kserve_s_rest_client(serving: Serving) -> None:
    found = read_by("kserve", f"http://{serving.address}")
    assert (found["live"], found["ready"], found["model"], found["unknown"]) == (True, True, True, False)
    for kind in ("json", "binary"):
        answer = found[kind]
        assert (answer["id"], answer["model"]) == ("7", "simple")
        assert answer["outputs"] == {"OUTPUT0": TWICE, "OUTPUT1": NOUGHT}
    status, words = found["error"]
    assert status == 400 and "expected a list of tensors" in words, "our own words reach the caller"


@pytest.mark.slow
def test_kserve_s_grpc_client(serving: Serving) -> None:
    found = read_by("kserve_grpc", serving.grpc)
    assert (found["live"], found["ready"], found["model"], found["unknown"]) == (True, True, True, False)
    for kind in ("typed", "raw"):
        answer = found[kind]
        assert (answer["id"], answer["model"]) == ("7", "simple")
        assert answer["outputs"] == {"OUTPUT0": TWICE, "OUTPUT1": NOUGHT}
    status, words = found["error"]
    assert status == "INVALID_ARGUMENT" and "expected 2 inputs" in words, "our own words reach the caller"


@pytest.mark.slow
def test_pytriton_s_clients(serving: Serving) -> None:
    found = read_by("pytriton", f"http://{serving.address}")
    assert found["config"] == ["simple", 8, ["INPUT0", "INPUT1"]]
    second = [2 * number + 2 for number in range(16)]
    for how in ("sync", "asyncio"):
        assert found[how]["sample"] == {"OUTPUT0": TWICE, "OUTPUT1": NOUGHT}
        assert found[how]["batch"] == {"OUTPUT0": TWICE + second, "OUTPUT1": NOUGHT * 2}
    assert found["futures"] == list(range(8))
    assert "INPUT0" in found["error"]


@pytest.mark.slow
def test_mlserver_s_types_codecs_and_infer_client(serving: Serving) -> None:
    found = read_by("mlserver", f"http://{serving.address}")
    assert found["server"] == ["triton", True]
    inputs = [["INPUT0", "INT32", [-1, 16]], ["INPUT1", "INT32", [-1, 16]]]
    assert found["model"] == ["simple", ["1"], inputs]
    assert found["id"] == "7" and found["outputs"] == {"OUTPUT0": TWICE, "OUTPUT1": NOUGHT}
    assert "INPUT0" in found["error"]
    assert found["offline"] == [0, 2, 4, 6, 8]
