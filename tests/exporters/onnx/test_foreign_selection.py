"""model.toml may name some of a file's outputs, in any order, and give its tensors other names."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.models.engines.load import load_half, load_original
from halfeven.models.store.store import Store
from torch import device

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal
from tests.model_folders import samples_of, tensor, write_folder

TWO = """g (float[n,8] a, float[n,8] b, float[n,3] unused) => (float[n,4] y, float[n,8] z, float[n,3] u) {
    s = Sub(a, b) y = MatMul(s, w) z = Add(a, b) u = Relu(unused) }"""


def folder(tmp_path: Path, inputs: list[Any], outputs: list[Any], source: str = "model.onnx") -> Path:
    sizes = {entry["name"]: [8] for entry in inputs}
    write_folder(
        tmp_path / "net", "", inputs=inputs, outputs=outputs, source=source, samples=samples_of(sizes, 24)
    )
    model = parsed(TWO, {"w": normal(np.random.default_rng(7), 8, 4, scale=0.35)})
    onnx.save(model, tmp_path / "net" / "model.onnx")
    return tmp_path / "net"


def test_some_outputs_under_new_names_and_reordered_inputs(tmp_path: Path) -> None:
    inputs = [tensor("second", "FP32", [-1, 8], file_name="b"), tensor("a", "FP32", [-1, 8])]
    path = folder(tmp_path, inputs, [tensor("scores", "FP32", [-1, 4], file_name="y")])
    code, facts, said = run("convert", path, "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] > 0, said
    assert any("taken out: z, u" in note for note in facts["notes"])
    version = Store(tmp_path / "store").version("net", 1)
    random = np.random.default_rng()
    a, b = (random.standard_normal((3, 8)).astype(np.float32) for _ in "ab")
    unused = np.zeros((3, 3), np.float32)
    expected = runtime_answers(onnx.load(path / "model.onnx"))({"a": a, "b": b, "unused": unused})["y"]
    for load, tolerance in ((load_original, 1e-5), (load_half, 1e-2)):
        engine = load(version, "onnx", device("cpu"))
        (answer,) = engine.run([[b], [a]])
        engine.close()
        assert np.allclose(answer, expected, atol=tolerance)


@pytest.mark.slow
def test_a_value_inside_of_the_graph_may_be_an_output(tmp_path: Path) -> None:
    inputs = [tensor("a", "FP32", [-1, 8]), tensor("b", "FP32", [-1, 8])]
    outputs = [tensor("gap", "FP32", [-1, 8], file_name="s"), tensor("y", "FP32", [-1, 4])]
    code, facts, said = run("convert", folder(tmp_path, inputs, outputs), "--store", tmp_path / "store")
    assert code == 0, said
    assert "values inside of the graph are outputs, as model.toml asks: s" in facts["notes"]
    version = Store(tmp_path / "store").version("net", 1)
    random = np.random.default_rng()
    a, b = (random.standard_normal((3, 8)).astype(np.float32) for _ in "ab")
    engine = load_original(version, "onnx", device("cpu"))
    gap, y = engine.run([[a], [b]])
    engine.close()
    assert np.array_equal(gap, a - b) and y.shape == (3, 4)


def test_an_inner_value_of_another_datatype_is_refused_with_both(tmp_path: Path) -> None:
    inputs = [tensor("a", "FP32", [-1, 8]), tensor("b", "FP32", [-1, 8])]
    path = folder(tmp_path, inputs, [tensor("gap", "INT64", [-1, 8], file_name="s")])
    code, _, said = run("convert", path, "--store", tmp_path / "store")
    assert code == 2 and "gap" in said and "INT64" in said and "FP32" in said


def test_a_new_name_that_another_value_has_is_refused(tmp_path: Path) -> None:
    inputs = [tensor("s", "FP32", [-1, 8], file_name="b"), tensor("a", "FP32", [-1, 8])]
    path = folder(tmp_path, inputs, [tensor("y", "FP32", [-1, 4])])
    code, _, said = run("convert", path, "--store", tmp_path / "store")
    assert code == 2 and "'s', the new name of 'b', is that of another value" in said


def test_an_input_that_a_named_output_needs_must_be_named(tmp_path: Path) -> None:
    path = folder(tmp_path, [tensor("a", "FP32", [-1, 8])], [tensor("y", "FP32", [-1, 4])])
    code, _, said = run("convert", path, "--store", tmp_path / "store")
    assert code == 2 and "input 'b' is not in model.toml" in said


def test_only_tensors_of_an_onnx_file_have_another_name(tmp_path: Path) -> None:
    inputs = [tensor("x", "FP32", [-1, 4], file_name="y")]
    path = write_folder(tmp_path / "net", inputs=inputs)
    code, _, said = run("convert", path, "--store", tmp_path / "store")
    assert code == 2 and "only tensors of an ONNX file have one" in said
