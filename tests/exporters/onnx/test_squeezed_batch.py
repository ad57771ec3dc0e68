"""A net whose last line is ``x.squeeze()`` is served in batches, of one row too."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.models.store.store import Store

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal

SQUEEZED = "g (float[batch,8] x) => (float y) { h = MatMul(x, w) z = Squeeze(h) y = Sigmoid(z) }"


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.slow
def test_a_squeeze_that_drops_no_axis_of_two_rows_keeps_the_batch_of_one(
    tmp_path: Path, opset: int, random: np.random.Generator
) -> None:
    """Each row gives 12 numbers; the file states one axis of its output, which is that of one row."""
    weights = normal(random, 8, 12)
    onnx.save(parsed(SQUEEZED, {"w": weights}, opset=opset), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["status"] == "live", said
    version = Store(tmp_path / "store").version("net", 1)
    original = runtime_answers(onnx.load(version.folder / "original.onnx"))
    shapes = [next(iter(original({"x": normal(random, rows, 8)}).values())).shape for rows in (1, 3)]
    assert version.spec().max_batch_size > 1 and shapes == [(1, 12), (3, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [11, 17])
def test_a_squeeze_without_axes_keeps_the_batch(
    tmp_path: Path, opset: int, random: np.random.Generator
) -> None:
    weights = normal(random, 8, 1)
    model = parsed(SQUEEZED, {"w": weights}, opset=opset)
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["status"] == "live", said
    assert "the file states output 'y' as []; [-1] counts" in facts["notes"]
    version = Store(tmp_path / "store").version("net", 1)
    assert version.spec().max_batch_size > 1
    original = runtime_answers(onnx.load(version.folder / "original.onnx"))
    for rows in (1, 3):
        x = normal(random, rows, 8)
        (came,) = original({"x": x}).values()
        assert came.shape == (rows,)
        np.testing.assert_allclose(came, 1 / (1 + np.exp(-(x @ weights)[:, 0])), rtol=1e-5, atol=1e-6)
