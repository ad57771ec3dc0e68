"""``halfeven init`` writes a folder that converts as it is, with its guesses marked, and overwrites nothing unasked."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.guessing.bare import folder_at
from halfeven.models.store.store import Store
from halfeven.models.zoo import hf_bert
from safetensors.numpy import load_file, save_file

from tests.command_line import run
from tests.exporters.onnx.small_files import mlp
from tests.model_folders import LINEAR

CONFIRM = "# confirm: "


def written(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "model.toml").read_text())


def converts(folder: Path, store: Path) -> None:
    code, facts, said = run("convert", folder, "--store", store)
    assert code == 0 and facts["status"] == "live", said


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x) * mask[..., None]
        return {"scores": scores, "total": scores.sum((1, 2))}


def exported(path: Path) -> Path:
    rows, length = torch.export.Dim("rows", min=1, max=32), torch.export.Dim("length", min=2, max=50)
    inputs, axes = (torch.randn(3, 5, 6), torch.ones(3, 5)), {0: rows, 1: length}
    torch.export.save(
        torch.export.export(Masked().eval(), inputs, dynamic_shapes={"x": axes, "mask": axes}), path
    )
    return path


@pytest.mark.slow
def test_an_exported_program_in_half_is_taken_with_the_fp32_inputs_of_its_original(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=32)
    module, inputs = torch.nn.Linear(6, 4).half().eval(), (torch.randn(3, 6).half(),)
    torch.export.save(torch.export.export(module, inputs, dynamic_shapes=({0: rows},)), tmp_path / "net.pt2")
    code, facts, said = run("convert", tmp_path / "net.pt2", "--store", tmp_path / "store")
    assert code == 0 and facts["status"] == "live", said
    assert any("FP32 [-1,6]" in note for note in facts["notes"])


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor


@pytest.mark.slow
def test_an_exported_program_that_takes_a_number_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Scaled(), (torch.randn(3, 6), 3)), tmp_path / "net.pt2")
    code, _, said = run("init", tmp_path / "net.pt2", tmp_path / "folder")
    assert code != 0 and "takes 'factor', which is no tensor" in said


@pytest.mark.slow
def test_a_file_gets_a_folder_of_its_own_with_its_external_data(tmp_path: Path) -> None:
    onnx.save_model(
        mlp(), tmp_path / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0
    )
    code, facts, said = run("init", tmp_path / "net.onnx", tmp_path / "brought")
    assert code == 0 and facts["to_confirm"] == 1, said
    assert {file.name for file in (tmp_path / "brought").iterdir()} == {"model.toml", "net.onnx", "net.bin"}
    assert written(tmp_path / "brought")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    converts(tmp_path / "brought", tmp_path / "store")


@pytest.mark.slow
def test_a_link_to_a_file_of_another_name_is_taken_as_the_file_that_it_stands_for(tmp_path: Path) -> None:
    """A download cache keeps files so: snapshots/1/net.onnx is a link to blobs/DIGEST."""
    blob, link = tmp_path / "blobs/0a1b2c", tmp_path / "snapshots/1/net.onnx"
    blob.parent.mkdir()
    link.parent.mkdir(parents=True)
    onnx.save(mlp(), blob)
    link.symlink_to(blob)
    code, facts, said = run("convert", link, "--store", tmp_path / "store")
    assert code == 0 and facts["model"] == "net", said
    code, _, said = run("init", link, tmp_path / "brought")
    assert code == 0 and not (tmp_path / "brought/net.onnx").is_symlink(), said
    converts(tmp_path / "brought", tmp_path / "store")
    code, _, said = run("init", link, link.parent)
    assert code == 0 and written(link.parent)["source"] == "net.onnx", said


def test_a_model_toml_is_overwritten_only_when_that_is_asked(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "net.onnx")
    (tmp_path / "model.toml").write_text("mine")
    code, _, said = run("init", tmp_path / "net.onnx", tmp_path)
    assert code == 2 and "--force" in said and (tmp_path / "model.toml").read_text() == "mine"
    code, _, said = run("init", tmp_path / "net.onnx", tmp_path, "--force")
    assert code == 0 and CONFIRM in (tmp_path / "model.toml").read_text(), said


@pytest.mark.slow
def test_a_file_of_the_folder_is_overwritten_only_when_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, seed in ((tmp_path, 1), (tmp_path / "net", 2)):
        folder.mkdir(exist_ok=True)
        onnx.save(mlp(seed=seed), folder / "net.onnx")
    mine, theirs = ((folder / "net.onnx").read_bytes() for folder in (tmp_path / "net", tmp_path))
    code, _, said = run("init", "net.onnx")
    assert code == 2 and "net/net.onnx exists" in said
    assert (tmp_path / "net/net.onnx").read_bytes() == mine and not (tmp_path / "net/model.toml").exists()
    code, _, said = run("init", "net.onnx", "--force")
    assert code == 0 and (tmp_path / "net/net.onnx").read_bytes() == theirs, said
    assert sorted(file.name for file in (tmp_path / "net").iterdir()) == ["model.toml", "net.onnx"]


@pytest.mark.slow(seconds=11)
def test_samples_beside_a_module_are_overwritten_only_when_that_is_asked(tmp_path: Path) -> None:
    """A file that has these tensors already stays as it is, whatever else is in it."""
    (tmp_path / "model.py").write_text(LINEAR)
    mine, x = tmp_path / "samples.safetensors", np.random.default_rng().standard_normal((16, 4))
    words = ("init", f"{tmp_path}/model.py:build", "--samples")
    save_file({"x": x.astype(np.float16)}, mine)
    before = mine.read_bytes()
    code, _, said = run(*words, mine)
    assert code == 2 and f"{mine} exists" in said and mine.read_bytes() == before
    assert not (tmp_path / "model.toml").exists()
    save_file({"x": x.astype(np.float32)}, mine, {"of": "me"})
    np.savez(tmp_path / "inputs.npz", x=x.astype(np.float32))
    before = mine.read_bytes()
    code, _, said = run(*words, tmp_path / "inputs.npz")
    assert code == 0 and mine.read_bytes() == before, said
    np.savez(tmp_path / "inputs.npz", x=2 * x.astype(np.float32))
    code, _, said = run(*words, tmp_path / "inputs.npz", "--force")
    assert code == 0 and np.array_equal(load_file(mine)["x"], 2 * x.astype(np.float32)), said


@pytest.mark.slow
def test_an_exported_program_says_its_sizes_itself(tmp_path: Path) -> None:
    code, _, said = run("init", exported(tmp_path / "net.pt2"), tmp_path / "brought")
    assert code == 0, said
    found = written(tmp_path / "brought")
    assert found["max_batch_size"] == 32
    assert [t["shape"] for t in found["inputs"]] == [[-1, "size1=1..50", 6], [-1, "size1=1..50"]]
    assert {t["name"]: t["shape"] for t in found["outputs"]} == {"scores": [-1, -1, 4], "total": [-1]}
    converts(tmp_path / "brought", tmp_path / "store")


@pytest.mark.slow
def test_a_transformers_folder_is_written_into_and_takes_the_inputs_that_samples_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(hf_bert.__file__).parent / name, tmp_path / name)
    ids = np.random.default_rng().integers(0, 30, (16, 9))
    np.savez(tmp_path / "inputs.npz", input_ids=ids, token_type_ids=ids % 2)
    named = folder_at(tmp_path, tmp_path / "inputs.npz").spec.inputs
    assert [tensor.name for tensor in named] == ["input_ids", "token_type_ids"]
    code, _, said = run("init", tmp_path)
    assert code == 0, said
    found = written(tmp_path)
    assert [t["name"] for t in found["inputs"]] == ["input_ids", "attention_mask"]
    assert found["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 4], "kind": "logits"}]
    assert (tmp_path / "model.toml").read_text().count(CONFIRM) == 3


@pytest.mark.slow
def test_a_module_is_seen_from_example_inputs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LINEAR)
    code, _, said = run("init", f"{tmp_path}/model.py:build")
    assert code == 2 and "--samples" in said
    x = np.random.default_rng().standard_normal((16, 4)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    code, _, said = run("init", f"{tmp_path}/model.py:build", "--samples", tmp_path / "inputs.npz")
    assert code == 0, said
    assert written(tmp_path)["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}]
    assert np.array_equal(load_file(tmp_path / "samples.safetensors")["x"], x)
    converts(tmp_path, tmp_path / "store")


COMPLEX = """
import torch

class Spectrum(torch.nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)

build = Spectrum
"""
PAIRS = """
import torch

class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 8)

    def forward(self, x):
        h = torch.nn.functional.normalize(self.linear(x), dim=-1)
        return h @ h.T

def build():
    torch.manual_seed(5)
    return Pairs()
"""


@pytest.mark.slow
def test_a_module_that_pairs_every_row_with_every_row_is_not_batched(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PAIRS)
    x = np.random.default_rng().standard_normal((16, 4)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    code, facts, said = run("init", f"{tmp_path}/model.py:build", "--samples", tmp_path / "inputs.npz")
    assert code == 0 and any(
        "each row of 'output' has a place for each row" in g for g in facts["guesses"]
    ), said
    found = written(tmp_path)
    assert found["max_batch_size"] == 0 and found["outputs"][0]["shape"] == [-1, -1]
    assert np.array_equal(load_file(tmp_path / "samples.safetensors")["x"], x.reshape(8, 2, 4))
    converts(tmp_path, tmp_path / "store")
    spec = Store(tmp_path / "store").version(found["name"], 1).spec()
    assert [dim.fixed for dim in spec.inputs[0].shape] == [False, True]  # any number of rows is answered


LARGE_INSIDE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = torch.nn.Conv2d(3, 64, 1), torch.nn.Conv2d(64, 1, 1)

    def forward(self, x):
        return self.narrow(self.wide(x).relu()).mean((2, 3))

build = Net
"""
COUNTED_ROWS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 8)

    def forward(self, x):
        rows = len(x)
        return self.linear(x).tanh().reshape(rows, 2, 4)

build = Net
"""


def inited(folder: Path, source: str, **inputs: np.ndarray) -> tuple[dict[str, Any], str]:
    """The model.toml that is written for a module with these example inputs, as values and as text."""
    (folder / "model.py").write_text(source)
    np.savez(folder / "inputs.npz", **inputs)  # pyright: ignore[reportArgumentType]
    code, _, said = run("init", f"{folder}/model.py:build", "--samples", folder / "inputs.npz")
    assert code == 0, said
    return written(folder), (folder / "model.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("side", "rows"), [(32, 64), (256, 16)])
def test_a_batch_of_a_module_has_as_many_rows_as_one_value_inside_may_have_memory_for(
    tmp_path: Path, side: int, rows: int
) -> None:
    x = np.random.default_rng().standard_normal((3, 3, side, side)).astype(np.float32)
    found, text = inited(tmp_path, LARGE_INSIDE, x=x)
    assert found["max_batch_size"] == rows
    why = f"{CONFIRM}at most {rows}, for a value inside would have more than 256 MiB with {2 * rows}"
    assert (why in text) is (rows < 64)


@pytest.mark.slow
def test_a_module_that_counts_its_rows_gets_batches_of_one_that_convert(tmp_path: Path) -> None:
    x = np.random.default_rng().standard_normal((16, 4)).astype(np.float32)
    found, text = inited(tmp_path, COUNTED_ROWS, x=x)
    assert found["max_batch_size"] == 1 and [tensor["shape"] for tensor in found["inputs"]] == [[-1, 4]]
    assert f"{CONFIRM}1 because forward makes the number of rows a constant at {tmp_path}/model.py:10" in text
    assert "(`rows = len(x)`)" in text
    converts(tmp_path, tmp_path / "store")


@pytest.mark.slow
def test_targets_among_example_inputs_are_no_inputs_of_the_module(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LINEAR)
    x = np.random.default_rng().standard_normal((6, 4)).astype(np.float32)
    given = {"x": x, "target:output": np.arange(6) % 3}
    np.savez(tmp_path / "inputs.npz", **given)
    code, _, said = run("init", f"{tmp_path}/model.py:build", "--samples", tmp_path / "inputs.npz")
    assert code == 0, said
    assert [tensor["name"] for tensor in written(tmp_path)["inputs"]] == ["x"]
    assert load_file(tmp_path / "samples.safetensors").keys() == given.keys()


CENTRED = """
import torch

class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        scores = self.linear(x - x.mean(0))
        return {"scores": scores, "whole": scores.mean(0)}

build = Centred
"""


@pytest.mark.slow
def test_the_samples_of_a_module_that_is_not_batched_keep_targets_or_name_them(tmp_path: Path) -> None:
    x = np.random.default_rng().standard_normal((33, 4)).astype(np.float32)
    classes, whole = np.arange(33) % 3, np.ones((33, 3), np.float32)
    (tmp_path / "model.py").write_text(CENTRED)
    np.savez(tmp_path / "inputs.npz", **{"x": x, "target:scores": classes, "target:whole": whole})  # type: ignore[arg-type]
    code, facts, said = run("init", f"{tmp_path}/model.py:build", "--samples", tmp_path / "inputs.npz")
    assert code == 0 and written(tmp_path)["max_batch_size"] == 0, said
    found, notes = load_file(tmp_path / "samples.safetensors"), " ".join(facts["guesses"])
    assert found.keys() == {"x", "target:scores"} and "'target:whole' is left out of the samples" in notes
    assert np.array_equal(found["x"], x[:32].reshape(8, 4, 4)) and "the last 1 of 33 are left out" in notes
    assert np.array_equal(found["target:scores"], classes[:32].reshape(8, 4))
    converts(tmp_path, tmp_path / "store")


@pytest.mark.slow
def test_a_module_that_gives_complex_numbers_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(COMPLEX)
    np.savez(tmp_path / "inputs.npz", x=np.zeros((2, 4), np.float32))
    code, _, said = run("init", f"{tmp_path}/model.py:build", "--samples", tmp_path / "inputs.npz")
    assert code == 2 and "complex64" in said and "view_as_real" in said


@pytest.mark.slow
def test_a_class_is_taken_like_a_function_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
    )
    np.savez(tmp_path / "inputs.npz", x=np.random.normal(size=(16, 4)).astype(np.float32))
    for more in ((), ("--samples", tmp_path / "inputs.npz")):
        code, _, said = run("init", f"{tmp_path}/other.py:Net", *more)
        assert code == 2 and "other.py:Net does not exist" in said
    code, _, said = run("init", f"{tmp_path}/model.py:Nett", "--samples", tmp_path / "inputs.npz")
    assert code != 0 and "has no function 'Nett'" in said
    code, _, said = run("init", f"{tmp_path}/model.py:Net", "--samples", tmp_path / "inputs.npz")
    assert code == 0, said
    converts(tmp_path, tmp_path / "store")


def test_code_that_fails_is_reported_with_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build():\n    raise ValueError('no weights here')\n")
    np.savez(tmp_path / "inputs.npz", x=np.zeros((2, 4), np.float32))
    code, _, said = run("init", f"{tmp_path}/model.py:build", tmp_path / "there")
    assert code == 2 and f"model.toml is written beside {tmp_path / 'model.py'}: leave FOLDER out" in said
    code, _, said = run("init", f"{tmp_path}/model.py:build", "--samples", tmp_path / "inputs.npz")
    assert code == 4 and "no weights here" in said
    assert not (tmp_path / "model.toml").exists()
