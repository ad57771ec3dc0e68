"""An export for TensorRT has nothing that TensorRT lacks and halfeven can rewrite, and what it has is proven again."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.exported import onnx_pair
from halfeven.exporters.exported.folder import export, exported_version
from halfeven.exporters.exported.other_engine import answers_file, onnx_file, prove_engine
from halfeven.exporters.exported.tensorrt_operators import LackingOperation
from halfeven.exporters.inputs.samples import Samples, stored_samples
from halfeven.models.errors import ExportFailed, ParityRefused
from halfeven.models.store.manifest import sha256_of
from halfeven.models.store.store import Store, Version

from tests.kept import kept_store
from tests.model_folders import tensor, write_folder

pytestmark = pytest.mark.slow  # conversions

ADDING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, ids):
        rows = torch.arange(x.shape[0]).unsqueeze(1)
        hidden = torch.fft.irfft(torch.fft.rfft(self.embed(x).float()) * 0.5, n=16)
        totals = torch.zeros(x.shape[0], 10, 16).scatter_add(1, ids.unsqueeze(-1).expand(-1, -1, 16), hidden)
        board = totals.index_put((rows, ids), hidden, accumulate=True)
        return self.head(board)

def build():
    torch.manual_seed(5)
    return Net()
"""
LARGEST = ADDING.replace(
    "board = totals", "totals = totals.scatter_reduce(1, ids.unsqueeze(-1).expand(-1, -1, 16), hidden, 'amax')\n"
    "        board = totals"
)  # fmt: skip
REWRITTEN = {"DFT": 2, "ScatterElements (add)": 1, "ScatterND (add)": 1}


def _convert(where: Path) -> None:
    store, random = Store(where / "store"), np.random.default_rng(1)
    samples = {
        "x": random.standard_normal((24, 6, 16)).astype(np.float32),
        "ids": random.integers(0, 10, (24, 6)),
    }
    for name, source, forms in (
        ("both", ADDING, ()),
        ("alone", ADDING, ("torch",)),
        ("largest", LARGEST, ()),
    ):
        folder = write_folder(
            where / name,
            source,
            inputs=[tensor("x", "FP32", [-1, 6, 16]), tensor("ids", "INT64", [-1, 6])],
            outputs=[tensor("y", "FP32", [-1, 10, 4])],
            samples=samples,
            max_batch_size=8,
        )
        convert(folder, store, Options(forms=forms) if forms else Options())


@pytest.fixture(scope="module")
def store() -> Store:
    """``both`` forms, the torch form ``alone``, and one that scatters the ``largest`` numbers too."""
    return Store(kept_store(__file__, _convert) / "store")


def lacking(file: Path) -> list[str]:
    """The operations of a file that these models have and TensorRT lacks."""
    nodes = onnx.load(file).graph.node
    reducing = {node.op_type for node in nodes if any(entry.name == "reduction" for entry in node.attribute)}
    return [node.op_type for node in nodes if node.op_type == "DFT" or node.op_type in reducing]


@pytest.mark.parametrize("name", ["both", "alone"])
def test_the_rewritten_folder_proves_itself_again(
    name: str, version: Callable[[str], Version], tmp_path: Path
) -> None:
    said: list[str] = []
    facts = export(version(name), "tensorrt", tmp_path / "out", said.append)
    folder = Path(shutil.move(tmp_path / "out", tmp_path / "elsewhere"))
    found = exported_version(folder)
    assert facts["files"] == {file: sha256_of(folder / file) for file in found.manifest["files"]}
    for file in ("half.onnx", "original.onnx"):
        assert lacking(folder / file) == []
        proof = prove_engine(found, stored_samples(found), onnx_file(folder / file, found.spec()))
        assert proof["status"] == "equal" and proof["samples"]["judging"] == 12
    operations = [each["operation"] for each in found.manifest["exported"]["lacking"]]
    assert {operation: operations.count(operation) for operation in operations} == REWRITTEN
    (words,) = [line for line in said if line.startswith("proving the half again")]
    assert words.endswith(
        "2 DFT, 1 ScatterElements (add), 1 ScatterND (add) rewritten as operations that TensorRT has"
    )
    text = (folder / "README.md").read_text()
    assert len(re.findall(r"^\| `\w+` \| (?:DFT|Scatter\w+ \(add\)) \| rewritten \|$", text, re.M)) == 4
    assert "One that stays as it is" not in text


def test_the_proof_is_that_of_the_files_in_the_folder(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    both = version("both")
    export(both, "tensorrt", tmp_path)
    proof = Version.at(tmp_path).json("parity.json")
    (report,) = proof["forms"].values()
    assert report["passed"] and report["samples"] == 12 and 0 < report["max_error_u"] <= 4
    assert report != both.json("parity.json")["forms"]["onnx"], "its last digits are those of other sums"
    assert f"{report['max_error_u']:.3g}" in (tmp_path / "README.md").read_text()


def test_a_file_of_answers_of_the_rewritten_half_passes_and_of_another_is_refused(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export(version("both"), "tensorrt", folder)
    found, rows = Version.at(folder), dict(np.load(folder / "inputs.npz"))
    engine = onnx_file(folder / "half.onnx", found.spec())
    assert callable(engine.asked)
    answers = engine.asked(rows)
    for factor, status in ((1, "equal"), (1.01, "refused")):
        scaled: dict[str, Any] = {name: array * factor for name, array in answers.items()}
        np.savez(tmp_path / "answers.npz", **scaled)
        proof = prove_engine(found, stored_samples(found), answers_file(tmp_path / "answers.npz"))
        assert proof["status"] == status


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_for_another_engine_the_files_of_the_store_are_given_as_they_are(
    engine: str, version: Callable[[str], Version], tmp_path: Path
) -> None:
    both = version("both")
    export(both, engine, tmp_path / "out")
    found = Version.at(tmp_path / "out")
    for file in ("half.onnx", "original.onnx"):
        assert found.manifest["files"][file] == both.manifest["files"][file]
        assert len(lacking(tmp_path / "out" / file)) == 4
    assert "lacking" not in found.manifest["exported"]
    assert "TensorRT" not in (tmp_path / "out" / "README.md").read_text()


def test_what_is_left_is_named_and_does_not_keep_the_model_from_being_exported(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    said: list[str] = []
    folder = tmp_path / "out"
    export(version("largest"), "tensorrt", folder, said.append)
    assert lacking(folder / "half.onnx") == ["ScatterElements"]
    found = exported_version(folder)
    left = [each for each in found.manifest["exported"]["lacking"] if each["left_because"]]
    assert [each["operation"] for each in left] == ["ScatterElements (max)"]
    assert len(found.manifest["exported"]["lacking"]) == 5
    assert [line for line in said if "TensorRT lacks ScatterElements (max), which stays as it is" in line]
    text = (folder / "README.md").read_text()
    assert f"| `{left[0]['output']}` | ScatterElements (max) | halfeven does not rewrite" in text
    assert "One that stays as it is" in text
    proof = prove_engine(found, stored_samples(found), onnx_file(folder / "half.onnx", found.spec()))
    assert proof["status"] == "equal"


@pytest.mark.parametrize(
    ("file", "alone", "error", "words"),
    [
        (
            "half.onnx",
            False,
            ParityRefused,
            "the half of both@1 was expected to be equal to its original, and it is not",
        ),
        ("original.onnx", False, ExportFailed, "the original of both@1 was expected to answer as before"),
        ("original.onnx", True, ExportFailed, "the original of both@1 was expected to answer as before"),
    ],
)
def test_a_rewriting_that_is_wrong_is_not_exported(
    file: str,
    alone: bool,
    error: type[Exception],
    words: str,
    version: Callable[[str], Version],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = onnx_pair.rewrite_for_tensorrt

    def spoilt(path: Path, samples: Samples, rows: int) -> list[LackingOperation]:
        if alone and path.name != file:
            return [LackingOperation("y", "DFT", "it is too large here")]
        found = real(path, samples, rows)
        if path.name == file:
            model = onnx.load(path)
            matrix = next(t for t in model.graph.initializer if "constant" in t.name and len(t.dims) == 2)
            numbers = onnx.numpy_helper.to_array(matrix) * np.float32(1.01)
            matrix.CopyFrom(onnx.numpy_helper.from_array(numbers, matrix.name))
            onnx.save(model, path)
        return found

    monkeypatch.setattr(onnx_pair, "rewrite_for_tensorrt", spoilt)
    with pytest.raises(error, match=f"with 2 DFT.*{words}.*--for onnxruntime"):
        export(version("both"), "tensorrt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
