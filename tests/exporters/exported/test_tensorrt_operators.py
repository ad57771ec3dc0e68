"""A file that is rewritten for TensorRT stays a whole file: its other operations, its names, its weights beside it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.exported import tensorrt_operators
from halfeven.exporters.onnx.reading import large_files
from halfeven.models.errors import ExportFailed

from tests.exporters.exported.rewritten_files import File, drawn, is_rewritten

MANY = """main (float[n,16] x, int64[n,16] ids) => (float[n,9,2] spectrum, float[n,16] sums)
 <float[16,16] weight = {%s}, int64[1] last = {-1}> {
    hidden = MatMul(x, weight)
    line = Unsqueeze(hidden, last)
    spectrum = DFT<axis = 1, onesided = 1>(line)
    once = ScatterElements<axis = 1, reduction = "add">(hidden, ids, x)
    sums = ScatterElements<axis = 1, reduction = "add">(once, ids, once)
    unused = Neg(sums)
}"""


def many(folder: Path, random: np.random.Generator) -> tuple[File, dict[str, np.ndarray]]:
    """A transform and two scatters, of which one reads the other's sums."""
    weights = ",".join(f"{number:.4f}" for number in random.standard_normal(256))
    inputs = {"x": drawn(random, (5, 16)), "ids": random.integers(-16, 16, (5, 16))}
    return File(folder, MANY % weights), inputs


def test_all_operations_of_a_file_are_rewritten_and_inputs_outputs_and_weights_keep_their_names(
    tmp_path: Path, random: np.random.Generator
) -> None:
    file, inputs = many(tmp_path, random)
    before = file.answers(inputs)
    graph = onnx.load(file.path).graph
    found = file.rewrite(inputs, 8)
    assert is_rewritten(found)
    assert [(each.output, each.operation) for each in found] == [
        ("spectrum", "DFT"), ("once", "ScatterElements (add)"), ("sums", "ScatterElements (add)"),
    ]  # fmt: skip
    after = onnx.load(file.path).graph
    assert after.input == graph.input and [value.name for value in after.output] == ["spectrum", "sums"]
    assert "weight" in {tensor.name for tensor in after.initializer}
    assert not {"DFT", "ScatterElements"} & set(file.operations)
    for one, other in zip(before, file.answers(inputs), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-4)
    for rows in (1, 3):
        few = {name: array[:rows] for name, array in inputs.items()}
        assert np.allclose(file.answers(few)[1], before[1][:rows], rtol=1e-5, atol=1e-4), (
            "the batch stays free"
        )
    written = file.path.read_bytes()
    assert file.rewrite(inputs, 8) == [] and file.path.read_bytes() == written


def test_weights_that_stand_beside_the_file_stand_beside_it_again(
    tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_files, "SELF_CONTAINED_BELOW", 512)
    monkeypatch.setattr(large_files, "_SMALL", 64)
    file, inputs = many(tmp_path, random)
    beside = file.path.with_name("model.onnx.data")
    before, size = file.answers(inputs), beside.stat().st_size
    assert is_rewritten(file.rewrite(inputs, 8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert beside.stat().st_size > size, "with the matrix of the transform"
    held = {
        tensor.name: tensor for tensor in onnx.load(file.path, load_external_data=False).graph.initializer
    }
    assert held["weight"].data_location == onnx.TensorProto.EXTERNAL
    for one, other in zip(before, file.answers(inputs), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-4)


def test_an_operation_that_is_left_does_not_keep_another_from_being_rewritten(
    tmp_path: Path, random: np.random.Generator
) -> None:
    text = (
        "main (float[n,8,1] x, float[m,k,1] z) => (float[n,8,2] y, float[m,k,2] w) <int64 a = {1}>"
        " { y = DFT(x, , a) w = DFT(z, , a) }"
    )
    file = File(tmp_path, text, 20)
    inputs = {"x": drawn(random, (2, 8, 1)), "z": drawn(random, (2, 4, 1))}
    done, left = file.rewrite(inputs)
    assert (done.output, done.left_because) == ("y", "")
    assert left.output == "w" and "its length is not a constant" in left.left_because
    assert file.operations.count("DFT") == 1


def test_an_operation_that_halfeven_cannot_rewrite_is_named(
    tmp_path: Path, random: np.random.Generator
) -> None:
    file = File(tmp_path, "main (float[3,3] x) => (float y) { y = Det(x) }")
    (found,) = file.rewrite({"x": drawn(random, (3, 3))})
    assert (found.output, found.operation) == ("y", "Det") and "does not rewrite" in found.left_because


def test_a_file_that_would_not_be_valid_is_an_error_that_names_it(
    tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such type")

    monkeypatch.setattr(tensorrt_operators, "check_file", refuse)
    file, inputs = many(tmp_path, random)
    with pytest.raises(ExportFailed, match=r"model\.onnx is not valid.*no such type.*--for onnxruntime"):
        file.rewrite(inputs, 8)
