"""An exported folder holds the proven half, its proof and what proves it again; what is not proven is not exported."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.exported import folder as exporting
from halfeven.exporters.exported.folder import export, exported_version
from halfeven.exporters.exported.other_engine import answers_file, onnx_file, prove_engine
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.models.engines.load import load_original
from halfeven.models.errors import BadInput, BadSetting, Conflict, DamagedFile, ExportFailed, ParityRefused
from halfeven.models.store.manifest import digest_of, sha256_of
from halfeven.models.store.store import Store, Version

from tests.kept import kept_store
from tests.model_folders import LINEAR, samples_of, tensor, write_folder
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow  # a conversion and processes of their own

LOUD = LINEAR.replace("nn.Tanh()", "nn.Tanh(), Loud()").replace(
    "def build",
    "class Loud(nn.Module):\n    def forward(self, x):\n        return (x * 3e3) * 3e3 / 9e6\n\ndef build",
)
LENGTHS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x, scale):
        return self.last(torch.tanh(self.first(x)).mean(1) * scale)

def build():
    torch.manual_seed(5)
    return Net()
"""


def _convert(where: Path) -> None:
    store = Store(where / "store")
    samples = samples_of({"x": [4]}, 24, seed=1)
    both = write_folder(where / "both", LINEAR, samples=samples)
    torch_alone = write_folder(where / "alone", LINEAR, samples=samples)
    loud = write_folder(where / "loud", LOUD, samples=samples, precision={"level": "O3"})
    original = write_folder(where / "original", LINEAR, samples=samples, precision={"level": "O0"})
    live = write_folder(where / "live", LINEAR, samples=samples, form="live")
    single = write_folder(
        where / "single",
        LINEAR,
        inputs=[tensor("x", "FP32", [2, 4])],
        outputs=[tensor("x", "FP32", [2, 3])],
        samples=samples_of({"x": [2, 4]}, 24, seed=1),
        max_batch_size=0,
    )
    free = write_folder(
        where / "free",
        LENGTHS,
        inputs=[tensor("x", "FP32", [-1, "length=2..9", 4]), tensor("scale", "FP32", [-1, 1])],
        samples=samples_of({"x": [5, 4], "scale": [1]}, 24, seed=1),
        max_batch_size=8,
    )
    for folder in (both, loud, original, live, single, free):
        convert(folder, store)
    convert(torch_alone, store, Options(forms=("torch",)))


@pytest.fixture(scope="module")
def store() -> Store:
    """``both`` forms, the torch form ``alone``, ``loud`` (refused), ``original`` (FP32), ``live``, ``single``
    (unbatched, input and output of one name), ``free`` (a named length)."""
    return Store(kept_store(__file__, _convert) / "store")


@pytest.mark.parametrize("name", ["both", "alone", "single", "free"])
def test_the_folder_alone_proves_its_half_again(
    name: str, version: Callable[[str], Version], tmp_path: Path
) -> None:
    facts = export(version(name), "onnxruntime", tmp_path / "out")
    moved = Path(shutil.move(tmp_path / "out", tmp_path / "elsewhere"))
    found = exported_version(moved)
    assert (found.name, found.number, found.manifest["half"]) == (name, 1, "fp16")
    assert facts["files"] == {file: sha256_of(moved / file) for file in found.manifest["files"]}
    for file in ("half.onnx", "original.onnx"):
        proof = prove_engine(found, stored_samples(found), onnx_file(moved / file, found.spec()))
        assert proof["status"] == "equal" and proof["samples"]["judging"] == 12


def test_the_half_of_the_store_is_given_away_as_it_was_proven(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    both = version("both")
    export(both, "tensorrt", tmp_path / "out")
    for file in ("half.onnx", "original.onnx", "samples.safetensors", "spec.json", "precision.json"):
        assert sha256_of(tmp_path / "out" / file) == both.manifest["files"][file]
    proof = Version.at(tmp_path / "out").json("parity.json")
    assert proof["forms"]["onnx"] == both.json("parity.json")["forms"]["onnx"]
    assert proof["environment"] == both.json("parity.json")["environment"]


def test_a_version_of_format_1_is_loaded_and_exported_as_any_other(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    shutil.copytree(version("both").folder, tmp_path / "store" / "models" / "both" / "1")
    older = Store(tmp_path / "store").version("both", 1)
    files = {file: of_format_1(older, file) for file in older.manifest["files"]}
    found = {renamed: sha256_of(older.folder / renamed) for renamed in files.values()}
    manifest = {**older.manifest, "format": 1, "files": found, "digest": digest_of(found)}
    (older.folder / "manifest.json").write_text(json.dumps(manifest))
    older = Store(tmp_path / "store").version("both", 1)
    assert {"whole.pt2", "whole.onnx"} <= set(older.manifest["files"]) and older.has("original.pt2")
    x = np.ones((1, 4), np.float32)
    for form in ("torch", "onnx"):
        engine, present = (load_original(one, form, torch.device("cpu")) for one in (older, version("both")))
        np.testing.assert_array_equal(engine.run([[x]])[0], present.run([[x]])[0])
    export(older, "onnxruntime", tmp_path / "out")
    assert (tmp_path / "out" / "original.onnx").exists()
    assert older.json("parity.json") == version("both").json("parity.json")


def of_format_1(version: Version, file: str) -> str:
    """Rename one file, and the keys in it, as they were in format 1; gives its name there."""
    older = file.replace("original.", "whole.")
    path = (version.folder / file).rename(version.folder / older)
    if path.suffix == ".json":
        path.write_text(re.sub(r'original(?=_because|": )|(?<=accuracy_)original', "whole", path.read_text()))
    return older


def test_a_version_with_the_torch_form_alone_gets_an_onnx_form_that_is_proven(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    assert not version("alone").has("half.onnx")
    export(version("alone"), "tensorrt", tmp_path / "out")
    report = Version.at(tmp_path / "out").json("parity.json")["forms"]["onnx"]
    assert report["passed"] and report["samples"] == 12 and 0 < report["max_error_u"] <= 4
    halves = {t.data_type for t in onnx.load(tmp_path / "out" / "half.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT16 in halves


def test_an_onnx_form_that_is_not_equal_is_not_exported(
    version: Callable[[str], Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfeven.exporters.torch.onnx_form import export as onnx_export

    real = onnx_export.write_onnx

    def spoilt(program: object, spec: object, path: Path, about: object) -> None:
        real(program, spec, path, about)  # type: ignore[arg-type]
        if path.name == "half.onnx":
            model = onnx.load(path)
            weight = next(t for t in model.graph.initializer if len(t.dims) == 2)
            weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 2, weight.name))
            onnx.save(model, path)

    monkeypatch.setattr(onnx_export, "write_onnx", spoilt)
    with pytest.raises(ParityRefused, match="the ONNX form of alone@1 is not equal"):
        export(version("alone"), "tensorrt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("loud", ParityRefused, "refused by the parity gate"),
        ("original", BadInput, "no half to export"),
        ("live", ExportFailed, "live form alone"),
    ],
)
def test_what_has_no_proven_half_is_refused_by_name(
    name: str, error: type[Exception], words: str, version: Callable[[str], Version], tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        export(version(name), "tensorrt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_never_written_to(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    begun: list[str] = []
    for target in (tmp_path, tmp_path / "file"):
        with pytest.raises(Conflict, match="not an empty folder"):
            export(version("both"), "tensorrt", target, begun.append)
    assert begun == [], "nothing is computed for a folder that cannot be written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes.txt"]
    (tmp_path / "empty").mkdir()
    export(version("both"), "tensorrt", tmp_path / "empty")
    assert (tmp_path / "empty" / "half.onnx").is_file()


def test_a_folder_that_is_filled_meanwhile_is_left_as_it_is(
    version: Callable[[str], Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(*_: object) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")

    monkeypatch.setattr(exporting, "write_manifest", filled)
    with pytest.raises(Conflict, match="not an empty folder"):
        export(version("both"), "tensorrt", tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]


def test_an_export_that_fails_leaves_nothing_behind(
    version: Callable[[str], Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_rows", full)
    with pytest.raises(OSError, match="No space"):
        export(version("both"), "tensorrt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_changed_file_of_the_folder_is_not_judged_by(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    export(version("both"), "onnxruntime", tmp_path / "out")
    with (tmp_path / "out" / "original.onnx").open("ab") as file:
        file.write(b"\0")
    found = Version.at(tmp_path / "out")
    with pytest.raises(DamagedFile, match=r"original\.onnx"):
        prove_engine(found, stored_samples(found), onnx_file(tmp_path / "out" / "half.onnx", found.spec()))


@pytest.mark.parametrize("name", ["live", "both"])
def test_the_folder_of_another_version_is_not_taken_for_an_exported_one(
    name: str, version: Callable[[str], Version]
) -> None:
    """A live version would run its code."""
    with pytest.raises(BadInput, match="not a folder that `halfeven export` wrote"):
        exported_version(version(name).folder)


def test_an_unknown_engine_is_refused_by_name(version: Callable[[str], Version], tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="tensorrt, onnxruntime, openvino"):
        export(version("both"), "tvm", tmp_path / "out")


def page(version: Version, engine: str, folder: Path) -> str:
    export(version, engine, folder)
    return (folder / "README.md").read_text()


def test_tensorrts_command_names_the_shapes_that_are_judged(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    free = page(version("free"), "tensorrt", tmp_path / "free")
    assert "--stronglyTyped" in free and "--fp16" not in free.split("```")[1]
    assert "--minShapes=x:1x2x4,scale:1x1" in free
    assert "--optShapes=x:8x5x4,scale:8x1" in free and "--maxShapes=x:8x9x4,scale:8x1" in free
    assert "Shapes" not in page(version("single"), "tensorrt", tmp_path / "single"), "nothing in it is free"
    digest = sha256_of(tmp_path / "free" / "half.onnx")
    assert f"| `half.onnx` | `{digest}` |" in free and "12 of your samples" in free


@pytest.mark.parametrize("name", ["free", "single"])
def test_the_program_on_the_page_answers_the_rows_and_its_answers_pass(
    name: str, version: Callable[[str], Version], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    (program,) = re.findall(r"```python\n(.*?)```", page(version(name), "onnxruntime", folder), re.S)
    subprocess.run(
        [sys.executable, "-c", dedent(program)],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    found, engine = Version.at(folder), answers_file(folder / "answers.npz")
    proof = prove_engine(found, stored_samples(found), engine)
    assert proof["status"] == "equal" and proof["samples"]["judging"] == 12
    assert proof["forms"]["engine"]["parity"]["perturbed"]["samples"] == 20
    expected, came = np.load(folder / "expected.npz"), np.load(folder / "answers.npz")
    (output,) = expected
    assert expected[output].shape == came[output].shape and len(came[output]) == 32
    assert not np.array_equal(expected[output], came[output]), "the half answered, not the original"


@pytest.mark.skipif(find_spec("openvino") is None, reason="needs the package openvino")
def test_openvinos_commands_build_an_engine_that_passes(
    version: Callable[[str], Version], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    text = page(version("free"), "openvino", folder)
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (folder / "ask.py").write_text(dedent(program))
    build = text.split("```console\n")[1].split("```")[0].replace("ovc", "-m openvino.tools.ovc", 1)
    for command in (build.split(), ["ask.py"]):
        subprocess.run(
            [sys.executable, *command], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S
        )
    found = Version.at(folder)
    proof = prove_engine(found, stored_samples(found), answers_file(folder / "answers.npz"))
    assert proof["status"] == "equal" and proof["forms"]["engine"]["max_error_u"] > 0
