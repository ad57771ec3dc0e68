"""A change of a signature is told in words, and a bare file may be given a name of its own."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import signature_change
from halfeven.exporters.guessing.guess import name_for
from halfeven.models.spec.spec import ModelSpec

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal
from tests.model_folders import write_folder
from tests.specs import tensor


def spec(*inputs: tuple[str, str, int], rows: int = 8) -> ModelSpec:
    taken = tuple(tensor(name, kind, -1, size) for name, kind, size in inputs)
    return ModelSpec("m", taken, (tensor("y", "FP32", -1, 3),), rows)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (spec(("x", "FP32", 4)), ""),
        (spec(("x", "FP32", 6)), "input 'x': FP32 [-1,4] became FP32 [-1,6]"),
        (spec(("x", "INT64", 4)), "input 'x': FP32 [-1,4] became INT64 [-1,4]"),
        (spec(("z", "FP32", 4)), "input 'x' (FP32 [-1,4]) is gone; input 'z' (FP32 [-1,4]) is new"),
    ],
)
def test_each_difference_is_named(new: ModelSpec, said: str) -> None:
    assert signature_change(spec(("x", "FP32", 4)), new) == said


def file(path: Path, width: int) -> Path:
    text = f"g (float[n,{width}] x) => (float[n,8] y) {{ y = MatMul(x, w) }}"
    onnx.save(parsed(text, {"w": normal(np.random.default_rng(), width, 8)}), path)
    return path


def test_a_file_that_is_called_model_has_the_name_of_its_folder() -> None:
    names = [name_for(Path(file)) for file in ("one/model.onnx", "two/model.onnx", "two/net.onnx")]
    assert names == ["one", "two", "net"]


@pytest.mark.slow
def test_a_bare_file_gets_a_name_of_its_own(tmp_path: Path) -> None:
    store = ("--store", tmp_path / "store")
    (tmp_path / "a").mkdir()
    first, other = file(tmp_path / "net.onnx", 16), file(tmp_path / "a/net.onnx", 12)
    assert run("convert", first, *store)[0] == 0
    code, _, said = run("convert", other, *store)
    assert code == 2 and "input 'x': FP32 [-1,16] became FP32 [-1,12]" in said and "--name NAME" in said
    code, _, said = run("convert", other, "--name", "second", *store)
    assert code == 0 and (tmp_path / "store/models/second").is_dir(), said


@pytest.mark.slow
def test_another_file_under_an_old_name_is_told(tmp_path: Path) -> None:
    store = ("--store", tmp_path / "store")
    assert run("convert", file(tmp_path / "one.onnx", 16), "--name", "net", *store)[0] == 0
    _, facts, _ = run("convert", file(tmp_path / "two.onnx", 16), "--name", "net", *store)
    assert any(
        "'net' was made of one.onnx before and is now made of two.onnx" in note for note in facts["notes"]
    )


def test_a_folder_has_its_name_in_model_toml(tmp_path: Path) -> None:
    code, _, said = run(
        "convert", write_folder(tmp_path / "net"), "--name", "other", "--store", tmp_path / "store"
    )
    assert code == 2 and "names the model 'net'" in said
