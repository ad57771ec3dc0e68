"""The budget of all trial runs of one file: its runs, its time and its memory, each with a sentence that names it."""

import os
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.guessing import file_runs as module
from halfeven.exporters.guessing.file_runs import file_runs
from halfeven.models.errors import EngineFailed, OutOfTime, TooLarge
from halfeven.models.order.one_order import (
    MEMORY_SETTING,
    RUNS_SETTING,
    SECONDS_SETTING,
    OrderBounds,
    one_order,
)

from tests.patience import PATIENCE_S

X = {"x": np.ones((2, 3), np.float32)}
DOUBLING = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 3] x) => (float[m, k] y) {
        trips = Constant<value_int: int = 40>()
        yes = Constant<value = bool {1}>()
        y = Loop(trips, yes, x)<body = once (int64 i, bool go, float[a, b] state) => (bool more, float[c, d] doubled) {
            more = Identity(go)
            doubled = Concat<axis = 0>(state, state)
        }>
    }"""
ENDLESS = DOUBLING.replace("int: int = 40", f"int: int = {2**62}").replace(
    "Concat<axis = 0>(state, state)", "Sin(state)"
)
PLAIN = """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }"""


def saved(folder: Path, text: str) -> tuple[Path, onnx.ModelProto]:
    model, path = onnx.parser.parse_model(text), folder / "net.onnx"
    onnx.save(model, path)
    return path, model


@pytest.mark.slow
def test_a_graph_that_doubles_without_end_is_ended_by_the_memory_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WITHOUT_MEMORY", 2)
    path, model = saved(tmp_path, DOUBLING)
    with one_order(OrderBounds(memory_bytes=2**30)), file_runs(path, model, ["y"]) as run:
        with pytest.raises(EngineFailed):
            run(X)
        assert run.failure.startswith("it needs more than 1,024 MiB") and MEMORY_SETTING in run.failure
        with pytest.raises(
            TooLarge, match=f"2 trial runs needed more than 1,024 MiB.*--samples.*{MEMORY_SETTING}"
        ):
            run(X)


def test_the_runs_of_a_file_are_counted_together(tmp_path: Path) -> None:
    path, model = saved(tmp_path, PLAIN)
    with one_order(OrderBounds(runs=3)), file_runs(path, model, ["y"]) as run:
        for _ in range(3):
            assert run(X)[0].shape == (2, 3)
        with pytest.raises(TooLarge, match=f"3 trial runs did not settle its sizes.*{RUNS_SETTING}"):
            run(X)


@pytest.mark.slow
def test_a_run_that_does_not_end_is_ended_with_the_time_of_its_order(tmp_path: Path) -> None:
    path, model = saved(tmp_path, ENDLESS)
    with one_order() as order, file_runs(path, model, ["y"]) as run:
        order._end_s = order._clock() + 0.2  # as if what was done before had taken the rest
        with pytest.raises(OutOfTime, match=f"a trial run was ended.*{SECONDS_SETTING}"):
            run(X)


RUNNING = """
import sys
from pathlib import Path
import numpy as np, onnx
from halfeven.exporters.guessing.file_runs import file_runs
path = Path(sys.argv[1])
with file_runs(path, onnx.load(path), ["y"]) as run:
    print(run._process.pid, flush=True)
    run({"x": np.ones((2, 3), np.float32)})
"""


@pytest.mark.slow
def test_a_run_that_does_not_end_ends_with_the_conversion_that_is_killed(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, ENDLESS)
    with subprocess.Popen([sys.executable, "-c", RUNNING, str(path)], stdout=subprocess.PIPE) as conversion:
        assert conversion.stdout is not None
        child = os.pidfd_open(int(conversion.stdout.readline()))
        conversion.kill()
    try:
        assert select.select([child], [], [], PATIENCE_S)[0], "the run goes on without its conversion"
    finally:
        os.close(child)
