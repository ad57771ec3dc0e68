"""The half of a model whose state has the batch on axis 1 takes and gives the shapes that the model itself does."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.half_files.half_file import proof_folder, verify, write_half
from halfeven.exporters.half_files.lock_file import checked, read_lock, write_lock
from halfeven.exporters.half_files.measured import found_file
from halfeven.exporters.onnx.runtime import runtime_answers
from onnx import ModelProto

from tests.exporters.half_files.verifier import verified_here
from tests.exporters.onnx.onnx_files import U, parsed
from tests.kept import kept_store
from tests.model_folders import samples_of
from tests.recurrent import HIDDEN, LAYERS, STEPS, WIDTH, recurrent_folder, requests

GRAPH = """net (float[n,4] x, float[2,n,4] h) => (float[n,4] y, float[2,n,4] hn)
{ a = MatMul(h, w) hn = Add(a, x) b = Mul(hn, h) y = ReduceSum<keepdims=0>(b, zero) }"""

pytestmark = pytest.mark.slow  # conversions


def _make(where: Path) -> None:
    where.mkdir()
    weights = {
        "w": np.random.default_rng(5).uniform(0.05, 0.25, (4, 4)).astype(np.float32),
        "zero": np.array([0]),
    }
    onnx.save(parsed(GRAPH, weights), where / "net.onnx")
    samples = samples_of({"x": (4,), "h": (2, 4)}, 24)
    np.savez(where / "rows.npz", x=samples["x"], h=samples["h"])
    write_half(where / "net.onnx", where / "net.fp16.onnx", Options(samples=where / "rows.npz"))


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The half, with its proof and ``net.onnx`` beside it."""
    return shutil.copytree(kept_store(__file__, _make), tmp_path / "files") / "net.fp16.onnx"


def shapes(model: ModelProto) -> dict[str, list[str | int]]:
    values = (*model.graph.input, *model.graph.output)
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in values
    }


def test_a_file_keeps_its_shapes_and_answers_in_them(half: Path) -> None:
    original, written, random = (
        onnx.load(half.with_name("net.onnx")),
        onnx.load(half),
        np.random.default_rng(),
    )
    assert shapes(written) == shapes(original)
    assert "Transpose" not in {node.op_type for node in written.graph.node}
    assert "has that of `h`, `hn` on" in (proof_folder(half) / "README.md").read_text()
    for rows in (1, 2, 5):  # two rows would fit the state's first axis, too
        x, h = random.standard_normal((rows, 4), np.float32), random.standard_normal((2, rows, 4), np.float32)
        expected, came = (runtime_answers(one)({"x": x, "h": h}) for one in (original, written))
        for name, array in expected.items():
            assert came[name].shape == array.shape
            assert np.abs(came[name] - array).max() <= 8 * U["fp16"] * np.abs(array).max()


def test_its_proof_is_made_again_by_the_gate_the_verifier_and_a_lock(half: Path) -> None:
    assert verify(half)["status"] == "equal"
    code, said = verified_here(half)
    assert code == 0, said
    write_lock(half.with_name("halfeven.lock"), {str(half): found_file(half)})
    ((_, _, changes),) = checked(
        read_lock(half.with_name("halfeven.lock")), lambda name: found_file(Path(name))
    )
    assert not [change for change in changes if change.fails]


def test_a_module_s_half_has_the_layout_of_the_module(tmp_path: Path) -> None:
    facts = write_half(recurrent_folder(tmp_path / "net"), tmp_path / "net.fp16.onnx")
    written = onnx.load(facts["file"])
    assert shapes(written)["x"][1:] == [STEPS, WIDTH]
    assert [shapes(written)[name][::2] for name in ("h", "hn")] == [[LAYERS, HIDDEN]] * 2
    answers = runtime_answers(written)(requests(3))
    assert answers["y"].shape == (3, 3) and answers["hn"].shape == (LAYERS, 3, HIDDEN)
    assert verify(tmp_path / "net.fp16.onnx")["status"] == "equal"
