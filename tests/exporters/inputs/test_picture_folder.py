"""Folders of pictures: the rows that requests would make of them, and classes by the folders' names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.samples import load_samples
from halfeven.models.errors import BadSamples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store
from halfeven.serve.cli.bringing import pack
from PIL import Image

from tests.model_folders import tensor, write_folder

LABELS = ("ant", "bee", "cat")
ENTRY = {"color": "L", "scale": 1 / 255}
NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
"""


def spec(batched: bool = True, labels: tuple[str, ...] = LABELS, **entry: Any) -> ModelSpec:
    batch = (Dim(),) if batched else ()
    image = TensorSpec("image", "FP32", (*batch, Dim(1, 1), Dim(), Dim()), picture={**ENTRY, **entry})
    scores = TensorSpec("scores", "FP32", (*batch, Dim(3, 3)), "logits", labels)
    return ModelSpec("net", (image,), (scores,), 8 if batched else 0)


@pytest.fixture
def draw(tmp_path: Path) -> Any:
    """Write a picture and give its row."""

    def write(name: str, height: int = 4, width: int = 4) -> np.ndarray:
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng().integers(0, 256, (height, width), np.uint8)
        Image.fromarray(pixels).save(path, "PNG")
        return (pixels / 255).astype(np.float32)[None]

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    return tmp_path / "pictures"


def test_folders_named_as_labels_are_classes_in_the_labels_order(draw: Any, folder: Path) -> None:
    names = ["cat/1.png", "ant/2.png", "cat/0.PNG", "ant/10.jpg"]
    rows = {name: draw(name) for name in names}
    (folder / "ant/notes.txt").write_text("not a picture")
    samples = load_samples(folder, spec())
    order = ["ant/10.jpg", "ant/2.png", "cat/0.PNG", "cat/1.png"]
    np.testing.assert_array_equal(samples.arrays["image"], [rows[name] for name in order])
    assert samples.targets["scores"].tolist() == [0, 0, 2, 2] and samples.targets["scores"].dtype == np.int64


@pytest.mark.parametrize("batched", [True, False])
def test_pictures_in_the_folder_itself_have_no_targets(batched: bool, draw: Any, folder: Path) -> None:
    rows = [draw(name) for name in ("a.png", "b.png")]
    samples = load_samples(folder, spec(batched))
    np.testing.assert_array_equal(samples.arrays["image"], rows)
    assert not samples.targets


def test_pictures_of_any_size_are_stretched_to_the_entrys(draw: Any, folder: Path) -> None:
    draw("a.png", 6, 3)
    draw("b.png", 2, 9)
    assert load_samples(folder, spec(size=[4, 5])).arrays["image"].shape == (2, 1, 4, 5)
    with pytest.raises(BadSamples, match=r"b.png: expected \[1, 6, 3\] as the others, got \[1, 2, 9\]"):
        load_samples(folder, spec())


def test_a_folder_that_does_not_fit_is_refused_by_what_is_in_it(draw: Any, folder: Path) -> None:
    with pytest.raises(
        BadSamples, match=r"pictures: there are no pictures in it; expected \.png, \.jpg, \.jpeg files"
    ):
        load_samples(folder, spec())
    draw("dog/1.png")
    with pytest.raises(
        BadSamples, match=r"the folder 'dog' is no label of the model: expected \['ant', 'bee'"
    ):
        load_samples(folder, spec())
    with pytest.raises(BadSamples, match="no output of kind logits or probabilities with labels"):
        load_samples(folder, spec(labels=()))
    draw("1.png")
    with pytest.raises(BadSamples, match=r"has pictures and folders \(dog\) side by side"):
        load_samples(folder, spec())
    plain = ModelSpec("net", (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),), spec().outputs, 8)
    with pytest.raises(BadSamples, match=r"needs a model with one input that has a picture entry.*\['x'\]"):
        load_samples(folder, plain)


def test_a_bad_picture_is_named_with_its_folder(draw: Any, folder: Path) -> None:
    draw("ant/1.png")
    (folder / "ant/2.png").write_bytes(b"GIF89a")
    with pytest.raises(BadSamples, match=r"pictures: ant/2.png: expected a PNG or JPEG file, got 6 bytes"):
        load_samples(folder, spec())


def test_rows_beyond_the_limit_are_refused_at_the_first(draw: Any, folder: Path) -> None:
    for index in range(3):
        draw(f"{index}.png")
    with pytest.raises(BadSamples, match="3 pictures take more than 191 bytes"):
        load_samples(folder, spec(), max_bytes=191)
    assert load_samples(folder, spec(), max_bytes=192).count == 3


def model_folder(path: Path) -> Path:
    inputs = [tensor("image", "FP32", [-1, 1, 4, 4], picture=ENTRY)]
    outputs = [tensor("scores", "FP32", [-1, 3], kind="logits", labels=list(LABELS))]
    return write_folder(path, NET, inputs=inputs, outputs=outputs, max_batch_size=8)


@pytest.mark.slow
def test_a_model_folder_may_keep_its_samples_as_pictures_and_notices_new_ones(
    draw: Any, folder: Path, tmp_path: Path
) -> None:
    for name in ("ant/1.png", "bee/1.png", "cat/1.png", "ant/2.png"):
        draw(name)
    net, store = model_folder(tmp_path / "net"), Store(tmp_path / "store")
    folder.rename(net / "samples")
    version = convert(net, store, Options(forms=("torch",))).version
    assert load_samples(version.file("samples.safetensors"), version.spec()).targets["scores"].tolist() == [
        0,
        0,
        1,
        2,
    ]
    assert convert(net, store, Options(forms=("torch",))).unchanged
    Image.new("L", (4, 4), 200).save(net / "samples/cat/2.png")
    again = convert(net, store, Options(forms=("torch",)))
    assert not again.unchanged
    assert load_samples(again.version.file("samples.safetensors"), version.spec()).count == 5


def test_packed_pictures_are_a_samples_file_for_a_folder_or_a_version(
    draw: Any, folder: Path, tmp_path: Path
) -> None:
    row = draw("bee/1.png")
    net, out = model_folder(tmp_path / "net"), tmp_path / "train.safetensors"
    facts = pack(str(net), folder, out, Store(tmp_path / "store"))
    assert facts == {"file": str(out), "rows": 1, "inputs": ["image"], "targets": ["scores"]}
    packed = load_samples(out, spec())
    np.testing.assert_array_equal(packed.arrays["image"], row[None])
    assert packed.targets["scores"].tolist() == [1]
