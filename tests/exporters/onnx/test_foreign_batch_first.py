"""A file whose state has the batch on axis 1 is read as a graph that has it first, with the same answers."""

# ruff: noqa: E501  (graphs in their own lines)

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.conversion import read_foreign
from halfeven.exporters.onnx.reading.graph import assembled
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.models.errors import BadFolder
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

from tests.exporters.onnx.onnx_files import convert_file, errors_u, parsed, saved
from tests.model_folders import samples_of

ROWS = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))
STATE = TensorSpec("h", "FP32", (Dim(), Dim(2, 2), Dim(4, 4)), batch_axis=1)
NEXT = replace(STATE, name="hn")
SPEC = ModelSpec("foreign", (ROWS, STATE), (replace(ROWS, name="y"), NEXT), 8)

GRAPHS = {
    "read once": "g (float[n,4] x, float[2,n,4] h) => (float[n,4] y, float[2,n,4] hn) { hn = Add(h, x) s = ReduceSum<keepdims=0>(hn, zero) y = MatMul(s, w) }",
    "the output read inside": "g (float[n,4] x, float[2,n,4] h) => (float[n,4] y, float[2,n,4] hn) { a = MatMul(h, w) hn = Add(a, x) b = Mul(hn, h) y = ReduceSum<keepdims=0>(b, zero) }",
    "read in a body": "g (float[n,4] x, float[2,n,4] h) => (float[n,4] y, float[2,n,4] hn) { hn = If(yes) <then_branch = t () => (float[2,n,4] o) { m = MatMul(h, w) o = Add(m, x) }, else_branch = e () => (float[2,n,4] p) { p = Identity(h) }> y = ReduceSum<keepdims=0>(hn, zero) }",
}


def model(text: str) -> onnx.ModelProto:
    weights = {
        "w": np.random.default_rng()
        .uniform(0.05, 0.25, (4, 4))
        .astype(np.float32),  # little cancels: a half is possible
        "zero": np.array([0]),
        "yes": np.array(True),
    }
    return parsed(text, weights)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_graph_takes_rows_first_and_answers_as_the_file_does(graph: str, tmp_path: Path) -> None:
    file, random = model(GRAPHS[graph]), np.random.default_rng()
    program, spec, _ = read_foreign(tmp_path / "m/model.onnx", saved(tmp_path / "m", file, SPEC))
    assert [value.name for value in program.graph.input] == ["x", "h"] and spec.inputs[1].batch_axis == 1
    x, h = random.standard_normal((3, 4), np.float32), random.standard_normal((2, 3, 4), np.float32)
    expected = runtime_answers(file)({"x": x, "h": h})
    came = runtime_answers(assembled(program.model, program.weights))({"x": x, "h": h.swapaxes(0, 1)})
    np.testing.assert_allclose(came["y"], expected["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(came["hn"].swapaxes(0, 1), expected["hn"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", ["the output read inside", "read in a body"])
def test_its_half_is_planned_and_equal_on_rows(graph: str, tmp_path: Path) -> None:
    samples = Samples(samples_of({"x": (4,), "h": (2, 4)}, 24))
    folder = saved(tmp_path / "m", model(GRAPHS[graph]), SPEC)
    converted = convert_file(folder, samples, folder.precision)
    assert converted.spec.max_batch_size == 8 and converted.half_nodes > 0
    assert max(errors_u(converted, samples_of({"x": (4,), "h": (2, 4)}, 5)).values()) <= 4


def test_a_rank_that_is_not_the_graph_s_is_refused_as_model_toml_wrote_it(tmp_path: Path) -> None:
    deep = replace(STATE, shape=(Dim(), Dim(2, 2), Dim(4, 4), Dim(1, 1)))
    spec = replace(SPEC, inputs=(ROWS, deep))
    with pytest.raises(BadFolder, match=r"says \[2,-1,4,1\], the graph has \[2,\?,4\]"):
        read_foreign(tmp_path / "m/model.onnx", saved(tmp_path / "m", model(GRAPHS["read once"]), spec))


def test_a_size_that_is_not_the_graph_s_is_refused_as_model_toml_wrote_it(tmp_path: Path) -> None:
    spec = replace(SPEC, inputs=(ROWS, replace(STATE, shape=(Dim(), Dim(3, 3), Dim(4, 4)))))
    with pytest.raises(BadFolder, match=r"says \[3,-1,4\], the graph has \[2,\?,4\]"):
        read_foreign(tmp_path / "m/model.onnx", saved(tmp_path / "m", model(GRAPHS["read once"]), spec))


def test_an_input_that_is_given_back_as_it_is_is_refused(tmp_path: Path) -> None:
    file = parsed("g (float[n,4] x, float[2,n,4] h) => (float[n,4] y, float[2,n,4] h) { y = Relu(x) }")
    spec = replace(SPEC, outputs=(SPEC.outputs[0], STATE))
    with pytest.raises(BadFolder, match="gives back as it is"):
        read_foreign(tmp_path / "m/model.onnx", saved(tmp_path / "m", file, spec))
