"""Files whose weights protobuf cannot write in one piece: as they are above 2 GiB, with that limit lowered here."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from halfeven.exporters.onnx.original_file import OriginalFile
from halfeven.exporters.onnx.reading import large_files
from halfeven.exporters.onnx.reading.batch_first import keep_squeezed_batch
from halfeven.exporters.onnx.reading.bounded_file import read_model
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.torch.onnx_form import export
from halfeven.models.errors import BadFolder
from halfeven.models.store.store import Store

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.model_folders import samples_of, write_folder

PERCEPTRON = """g (float[n,64] x) => (float[n,64] y)
    { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, v) d = Add(c, bias) y = Tanh(d) }"""


def perceptron() -> onnx.ModelProto:
    random = np.random.default_rng()
    shapes = {"w": (64, 64), "v": (64, 64), "bias": (64,)}
    return parsed(
        PERCEPTRON,
        {name: random.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()},
    )


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_files, "SELF_CONTAINED_BELOW", 2**14)


def test_a_large_model_is_saved_with_its_weights_beside_it_and_is_not_changed(tmp_path: Path) -> None:
    model = perceptron()
    before = model.SerializeToString()
    large_files.save(model, tmp_path / "large.onnx")
    assert model.SerializeToString() == before
    assert {file.name for file in tmp_path.iterdir()} == {"large.onnx", "large.onnx.data"}
    assert (tmp_path / "large.onnx").stat().st_size < 2**12
    onnx.checker.check_model(str(tmp_path / "large.onnx"), full_check=True)
    read = read_model(tmp_path / "large.onnx", tmp_path)
    expected = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    came = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in read.graph.initializer}
    assert all(np.array_equal(came.pop(name), array) for name, array in expected.items()) and not came


def test_a_large_model_that_is_not_valid_is_found_so(tmp_path: Path) -> None:
    model = perceptron()
    model.graph.node[0].input[0] = "nowhere"
    with pytest.raises(onnx.checker.ValidationError):
        large_files.check(model)


def test_a_squeeze_of_a_large_model_gets_its_axes_without_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    infer = onnx.shape_inference.infer_shapes

    def limited(model: onnx.ModelProto) -> onnx.ModelProto:
        if model.ByteSize() >= large_files.SELF_CONTAINED_BELOW:
            raise EncodeError("Failed to serialize proto")
        return infer(model)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", limited)
    text = "g (float[n,64] x) => (float y) { h = MatMul(x, w) y = Squeeze(h) }"
    model = parsed(text, {"w": np.ones((64, 64), np.float32)})
    keep_squeezed_batch(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Identity"]


def test_a_large_model_with_local_functions_is_not_planned() -> None:
    text = """g (float[n,64] x) => (float[n,64] y) { h = MatMul(x, w) y = my.twice(h) }
        <domain: "my", opset_import: ["" : 17]> twice (p) => (q) { q = Add(p, p) }"""
    model = parsed(text, {"w": np.ones((64, 64), np.float32)}, more=', "my" : 1')
    with pytest.raises(BadFolder, match="save it again with its functions inlined"):
        normalise(model, Path("model.onnx"))


def test_the_size_of_a_file_that_is_served_as_it_is_is_that_of_its_numbers() -> None:
    """Protobuf would not write a tensor of 2 GiB, to be measured so."""
    model, subject = perceptron(), None
    maker = OriginalFile(subject, model, lambda _: {}, "it is to be")  # type: ignore[arg-type]
    assert maker.facts()["bytes"] == 4 * (64 * 64 + 64 * 64 + 64)


@pytest.mark.slow
def test_a_large_file_is_converted_proven_again_and_answers_as_it_did(tmp_path: Path) -> None:
    model = perceptron()
    folder = tmp_path / "given"
    folder.mkdir()
    onnx.save_model(
        model, folder / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0
    )
    code, facts, said = run("convert", folder / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["status"] == "live" and facts["forms"]["onnx"]["half_nodes"] == 5, said
    version = Store(tmp_path / "store").version("net", 1)
    assert {"original.onnx", "original.onnx.data", "half.onnx", "half.onnx.data"} <= {
        f.name for f in version.folder.iterdir()
    }
    code, _, said = run("parity", "net", "--store", tmp_path / "store")
    assert code == 0, said
    code, _, said = run("export", "net", "--for", "tensorrt", tmp_path / "out", "--store", tmp_path / "store")
    assert code == 0 and (tmp_path / "out" / "half.onnx.data").is_file(), said


@pytest.mark.slow
def test_the_large_onnx_form_of_a_module_is_judged_and_proven_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SELF_CONTAINED_BELOW", 64)
    folder = write_folder(tmp_path / "net", samples=samples_of({"x": (4,)}, 16))
    code, facts, said = run("convert", folder, "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["passed"], said
    assert Store(tmp_path / "store").version("net", 1).has("half.onnx.data")
    code, _, said = run("parity", "net", "--store", tmp_path / "store")
    assert code == 0, said
