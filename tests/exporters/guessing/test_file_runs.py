"""The budget of all trial runs of one file: its runs, its time and its memory, each with a sentence that names it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.guessing import file_runs as module
from halfeven.exporters.guessing.file_runs import file_runs
from halfeven.models.errors import EngineFailed, OutOfTime, TooLarge

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
PLAIN = """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }"""


def saved(folder: Path, text: str) -> tuple[Path, onnx.ModelProto]:
    model, path = onnx.parser.parse_model(text), folder / "net.onnx"
    onnx.save(model, path)
    return path, model


def test_a_graph_that_doubles_without_end_is_ended_by_the_memory_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RUN_BYTES", 2**30)
    monkeypatch.setattr(module, "MOST_WITHOUT_MEMORY", 2)
    path, model = saved(tmp_path, DOUBLING)
    with file_runs(path, model, ["y"]) as run:
        with pytest.raises(EngineFailed):
            run(X)
        with pytest.raises(TooLarge, match=r"2 trial runs needed more than \d+ bytes of memory.*--samples"):
            run(X)


def test_the_runs_of_a_file_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RUNS", 3)
    path, model = saved(tmp_path, PLAIN)
    with file_runs(path, model, ["y"]) as run:
        for _ in range(3):
            assert run(X)[0].shape == (2, 3)
        with pytest.raises(TooLarge, match="3 trial runs did not settle its sizes"):
            run(X)


def test_the_time_of_all_runs_together_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = saved(tmp_path, PLAIN)
    with file_runs(path, model, ["y"]) as run:
        run(X)
        run._left_s = 0.0  # as if the runs before had taken it
        with pytest.raises(OutOfTime, match="its trial runs took 600 s together"):
            for _ in range(100):
                run(X)
