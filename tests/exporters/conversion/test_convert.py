"""A model folder is converted again after some changes, and not after others."""

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.conversion.convert import Conversion, Options, _fingerprint, _samples, convert
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs import drifted_inputs
from halfeven.exporters.inputs.drifted_inputs import folder_of, keep_input
from halfeven.exporters.proof.prove import MAX_JUDGED
from halfeven.models.errors import DamagedFile
from halfeven.models.folder.package import read_folder
from halfeven.models.store.store import Store

from tests.conversions import as_file, as_subject, samples_of
from tests.corpus import captured
from tests.model_folders import LINEAR, tensor, write_folder


def converted(folder: Path, store: Path) -> Conversion:
    return convert(folder, Store(store), Options(forms=("torch",), level="O0"))


@pytest.mark.slow
def test_a_store_in_the_folder_is_no_part_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`halfeven convert .` writes one there."""
    monkeypatch.chdir(write_folder(tmp_path / "net", LINEAR))
    first = converted(Path(), Path("halfeven-store"))
    assert converted(Path(), Path("halfeven-store")).unchanged
    Path("notes.txt").write_text("changed")
    again = converted(Path(), Path("halfeven-store"))
    assert (first.version.number, again.version.number) == (1, 2)
    sources = [file for file in again.version.manifest["files"] if file.startswith("source/")]
    assert sources == ["source/model.py", "source/model.toml", "source/notes.txt"]


@pytest.mark.slow
def test_kept_inputs_that_grow_too_old_make_no_new_version_and_deleted_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version without the old ones would drift again."""
    store, folder = Store(tmp_path / "store"), write_folder(tmp_path / "net", LINEAR)
    converted(folder, store.root)
    keep_input(store, "net", {"x": np.ones((1, 4), np.float32)}, 10)
    assert not converted(folder, store.root).unchanged
    with monkeypatch.context() as later:
        later.setattr(drifted_inputs, "KEPT_DAYS", -1)
        assert converted(folder, store.root).unchanged
    assert not list(folder_of(store, "net").iterdir())
    assert not converted(folder, store.root).unchanged and store.numbers("net") == [1, 2, 3]


@pytest.mark.slow
def test_a_damaged_version_is_made_again_of_an_unchanged_folder(tmp_path: Path) -> None:
    """Every message about a damaged file advises to convert the folder again."""
    folder = write_folder(tmp_path / "net", LINEAR)
    made = converted(folder, tmp_path / "store")
    for file in ("weights.safetensors", "manifest.json", "spec.json"):
        with (made.version.folder / file).open("r+b") as damaged:
            damaged.write(b"\xff")
        made = converted(folder, tmp_path / "store")
        assert not made.unchanged
        assert Store(tmp_path / "store").live_number("net") == made.version.number
    assert Store(tmp_path / "store").numbers("net") == [1, 2, 3, 4]


def test_a_damaged_file_of_promotions_is_named_before_anything_is_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (store.root / "models/net").mkdir(parents=True)
    (store.root / "models/net/promotions.json").write_text("{")
    with pytest.raises(DamagedFile, match=r"promotions\.json cannot be read"):
        converted(write_folder(tmp_path / "net", LINEAR), store.root)
    assert not store.numbers("net")


@pytest.mark.slow
def test_the_halves_that_missed_are_deleted_where_fp32_serves(tmp_path: Path) -> None:
    """No half of this model passes; what looks for `half.onnx` in a version must find none."""
    made = as_subject(captured("sigmoid tail"), samples_of("sigmoid tail", 32, seed=1))
    subject, maker = as_file(made, tmp_path, search=True)
    version = travel(subject, maker, Store(tmp_path / "store"), lambda _: None)
    assert version.json("precision.json")["kept"] and not list(version.folder.glob("half*"))


@pytest.mark.slow
def test_data_that_a_model_reads_beside_its_code_is_part_of_the_folder(tmp_path: Path) -> None:
    source = """
import numpy as np
import torch
from pathlib import Path

def build():
    net = torch.nn.Linear(4, 3)
    net.weight.data = torch.tensor(np.load(Path(__file__).with_name("w.npy")))
    return net
"""
    folder = write_folder(tmp_path / "net", source)
    random = np.random.default_rng()
    np.save(folder / "w.npy", random.standard_normal((3, 4)).astype(np.float32))
    first = converted(folder, tmp_path / "store").version
    np.save(folder / "w.npy", random.standard_normal((3, 4)).astype(np.float32))
    again = converted(folder, tmp_path / "store")
    assert not again.unchanged
    weights = "weights.safetensors"
    assert first.manifest["files"][weights] != again.version.manifest["files"][weights]
    assert converted(folder, tmp_path / "store").unchanged


@pytest.mark.slow
@pytest.mark.parametrize("path", [["../src"], []])
def test_code_that_is_imported_from_outside_the_folder_is_part_of_the_model(
    path: list[str], tmp_path: Path
) -> None:
    """The code's place is in the folder's ``path``, or the model's own code adds it to ``sys.path``."""
    own = "" if path else f"import sys\nsys.path.append({f'{tmp_path}/src/'!r})\n"
    folder = write_folder(tmp_path / "net", f"{own}from layers import build as build", path=path)
    (layers := tmp_path / "src" / "layers.py").parent.mkdir()
    layers.write_text(LINEAR)
    first = converted(folder, tmp_path / "store").version
    (layers.parent / "other.py").write_text("changed = True")  # nothing imports it
    assert converted(folder, tmp_path / "store").unchanged
    layers.write_text(LINEAR.replace("Tanh", "ReLU"))
    again = converted(folder, tmp_path / "store")
    assert not again.unchanged and again.version.digest != first.digest
    assert {Path(file).resolve() for file in first.manifest["imported"]} == {folder / "model.py", layers}


def test_changed_labels_are_part_of_the_folder_whatever_their_file_is_called(tmp_path: Path) -> None:
    outputs = [tensor("y", "FP32", [-1, 3], kind="logits", labels_file="coco.names")]
    folder = write_folder(tmp_path / "net", LINEAR, outputs=outputs, files={"coco.names": "a\nb\nc\n"})
    before = _fingerprint(read_folder(folder), Options())
    (folder / "coco.names").write_text("a\nb\nd\n")
    assert _fingerprint(read_folder(folder), Options()) != before


def test_a_note_says_how_many_samples_are_more_than_are_judged(tmp_path: Path) -> None:
    rows = np.random.default_rng().standard_normal((2 * MAX_JUDGED + 3, 4)).astype(np.float32)
    folder = read_folder(write_folder(tmp_path / "net", LINEAR, samples={"x": rows}))
    noted, _ = _samples(folder, Options(), Store(tmp_path / "store"))
    assert noted.notes == ("2 samples are left out: the first 2048 of those that may judge do",)


@pytest.mark.slow
def test_copies_of_a_sample_count_once_in_the_proof(tmp_path: Path) -> None:
    rows = np.random.default_rng().standard_normal((4, 4)).astype(np.float32)
    folder = write_folder(tmp_path / "net", LINEAR, samples={"x": np.repeat(rows, 32, axis=0)})
    done = convert(folder, Store(tmp_path / "store"), Options(forms=("torch",)))
    assert "124 of 128 samples repeat others and are left out" in done.facts["notes"]
    assert done.shown()["forms"]["torch"]["parity"]["samples"] == 2, "two plan and two judge"
