"""The zoo's digits: the shipped weights are as good as we say, and its script makes them again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halfeven.models.package import read_folder
from halfeven.models.zoo import zoo_folder
from halfeven.models.zoo.digits import train as training
from halfeven.models.zoo.digits.model import build
from safetensors.torch import load, load_file
from torch import nn

DIGITS = zoo_folder("digits")


@pytest.fixture(scope="module")
def shipped() -> nn.Module:
    module = build().eval()
    module.load_state_dict(load_file(DIGITS / "weights.safetensors"), strict=True)
    return module


@pytest.fixture(scope="module")
def samples() -> dict[str, torch.Tensor]:
    return load_file(DIGITS / "samples.safetensors")


def test_the_shipped_weights_read_at_least_98_percent_of_the_held_out_digits(
    shipped: nn.Module, samples: dict[str, torch.Tensor]
) -> None:
    assert training.accuracy(shipped, samples["image"], samples["target:logits"]) >= 0.98


def test_the_samples_are_what_the_model_takes(samples: dict[str, torch.Tensor]) -> None:
    image, target = samples["image"], samples["target:logits"]
    assert (image.dtype, tuple(image.shape[1:])) == (torch.float32, (1, 8, 8))
    assert (target.dtype, target.shape) == (torch.int64, image.shape[:1])
    assert image.min() == 0.0 and image.max() == 1.0
    assert torch.equal(target.bincount(minlength=10), torch.full((10,), len(target) // 10))


def test_the_picture_entry_turns_the_shipped_pixels_into_the_samples() -> None:
    picture = read_folder(DIGITS).spec.inputs[0].picture
    assert picture is not None
    pixels = load_file(DIGITS / "images.safetensors")["images"]
    assert picture["size"] == list(pixels.shape[1:])
    values = (pixels.float() * picture["scale"] - picture["mean"][0]) / picture["std"][0]
    assert torch.equal(values.unsqueeze(1), training.read_images()[0])


def test_the_samples_are_the_shipped_images_that_were_held_out(samples: dict[str, torch.Tensor]) -> None:
    images, labels = training.read_images()
    _, held_out = training.split(labels)
    assert torch.equal(samples["image"], images[held_out])
    assert torch.equal(samples["target:logits"], labels[held_out])


def test_nothing_is_both_trained_on_and_held_out() -> None:
    images, labels = training.read_images()
    rows, held_out = training.split(labels)
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(1797))
    seen = {image.numpy().tobytes() for image in images[rows]}
    assert not [image for image in images[held_out] if image.numpy().tobytes() in seen]


def test_another_seed_holds_out_other_images() -> None:
    _, labels = training.read_images()
    assert not torch.equal(training.split(labels, seed=1)[1], training.split(labels, seed=2)[1])


def test_the_script_run_twice_writes_the_same_files_and_a_net_that_reads(tmp_path: Path) -> None:
    written = [_run_script(tmp_path / name) for name in ("once", "again")]
    assert written[0] == written[1]
    module = build().eval()
    module.load_state_dict(load(written[0]["weights.safetensors"]), strict=True)
    samples = load(written[0]["samples.safetensors"])
    assert training.accuracy(module, samples["image"], samples["target:logits"]) >= 0.9


def _run_script(folder: Path) -> dict[str, bytes]:
    """Three epochs are enough to see it learn; `make weights` runs them all."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "halfeven.models.zoo.digits.train",
        "--epochs",
        "3",
        "--out",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_another_seed_trains_another_network() -> None:
    images, labels = training.read_images()
    one, two = (training.train(images[:64], labels[:64], epochs=1, seed=seed) for seed in (1, 2))
    weights = zip(one.parameters(), two.parameters(), strict=True)
    assert not all(torch.equal(first, second) for first, second in weights)


def test_training_leaves_the_callers_random_numbers_alone() -> None:
    images, labels = training.read_images()
    state = torch.random.get_rng_state()
    training.train(images[:64], labels[:64], epochs=1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_written_files_are_the_modules_state_and_its_samples(tmp_path: Path) -> None:
    module, image, target = build(), torch.rand(4, 1, 8, 8), torch.tensor([3, 1, 4, 1])
    training.write(module, image, target, tmp_path)
    written = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in module.state_dict().items())
    samples = load_file(tmp_path / "samples.safetensors")
    assert torch.equal(samples["image"], image) and torch.equal(samples["target:logits"], target)


@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_the_network_is_captured_with_a_free_batch(
    batch: int, shipped: nn.Module, samples: dict[str, torch.Tensor]
) -> None:
    free = {"image": {0: torch.export.Dim("batch", max=64)}}
    program = torch.export.export(shipped, (samples["image"][:3],), dynamic_shapes=free).module()
    image = samples["image"][:batch]
    with torch.inference_mode():
        torch.testing.assert_close(program(image), shipped(image))
