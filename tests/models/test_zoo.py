"""The zoo: every folder is what its model.toml says; the digits are as good as we say, and can be made again."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halfeven.exporters.inputs.synthetic import generate
from halfeven.models.capture.capture import capture
from halfeven.models.folder.package import read_folder
from halfeven.models.index_ranges.input_ranges import unproven_sites, with_ranges
from halfeven.models.program import runnable
from halfeven.models.zoo import zoo_folder
from halfeven.models.zoo.digits import train as training
from halfeven.models.zoo.digits.model import build
from safetensors.torch import load, load_file
from torch import nn

from tests.patience import PATIENCE_S
from tests.programs import original
from tests.slow import one_in_turn, slow_but

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


@pytest.mark.slow
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_bytes() for file in folder.iterdir()}


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


# Every folder.

FOLDERS = sorted(file.parent.name for file in DIGITS.parent.glob("*/model.toml"))
OF_TRANSFORMERS = [name for name in FOLDERS if name.startswith("hf_")]
OF_TORCH = [name for name in FOLDERS if name not in OF_TRANSFORMERS]
MOST_BYTES = 300_000  # of a folder that is not the demo's

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers (pip install 'halfeven[hf]')"
)


def built(name: str) -> nn.Module:
    """The module as the capture builds it, but in this process."""
    return importlib.import_module(f"halfeven.models.zoo.{name}.model").build().eval().requires_grad_(False)


def asked(name: str, rows: int, seed: int = 11) -> dict[str, torch.Tensor]:
    generated = generate(read_folder(zoo_folder(name)).spec, rows, seed)
    return {key: torch.from_numpy(array) for key, array in generated.arrays.items()}


def answers(module: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        found = module(**inputs)
    return found if isinstance(found, tuple) else (found,)


def rows_of(name: str) -> int:
    return min(8, read_folder(zoo_folder(name)).spec.max_batch_size)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_named_as_it_is_told_of_and_is_small(name: str) -> None:
    folder = read_folder(zoo_folder(name))
    assert folder.spec.name == name
    assert f"| `{name}` |" in (DIGITS.parent / "README.md").read_text()
    shipped = [
        file for file in folder.folder.rglob("*") if "__pycache__" not in file.parts and file.is_file()
    ]
    assert name == "digits" or sum(file.stat().st_size for file in shipped) < MOST_BYTES


def test_the_readme_tells_of_no_folder_that_is_not_there() -> None:
    lines = (DIGITS.parent / "README.md").read_text().splitlines()
    assert sorted(line.split("`")[1] for line in lines if line.startswith("| `")) == FOLDERS


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_model_answers_as_its_toml_says(name: str) -> None:
    spec, inputs = read_folder(zoo_folder(name)).spec, asked(name, rows_of(name))
    found = answers(built(name), inputs)
    for tensor, output in zip(spec.outputs, found, strict=True):
        assert tensor.fault(output.shape, tensor.datatype) is None
        assert output.dtype == tensor.type.torch
        assert bool(torch.isfinite(output).all())
        assert len(output) == 1 or not torch.equal(output[:-1], output[1:])
    assert all(len(output) == rows_of(name) for output in found)


@pytest.mark.parametrize("name", [name for name in OF_TORCH if name != "digits"])
def test_a_model_built_twice_is_the_same_model_and_leaves_no_weights_to_chance(name: str) -> None:
    torch.manual_seed(1)
    first = built(name).state_dict()
    torch.manual_seed(2)
    second = built(name).state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    "name", slow_but(("mlp", "lstm"), [name for name in OF_TORCH if name not in ("digits", "switch")])
)
def test_hardly_a_first_choice_is_closer_than_half_precision_can_tell(name: str) -> None:
    spec, inputs = read_folder(zoo_folder(name)).spec, asked(name, 1024)
    for tensor, output in zip(spec.outputs, answers(built(name), inputs), strict=True):
        if tensor.kind == "logits":
            first, second = output.flatten(0, -2).topk(2, dim=-1).values.unbind(-1)
            close = first - second < 2.0**-12 * output.abs().max()
            assert float(close.float().mean()) <= 0.005


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name", one_in_turn(OF_TRANSFORMERS, 0))
def test_a_transformers_folder_is_captured_with_its_free_length(name: str) -> None:
    folder = read_folder(zoo_folder(name))
    captured = capture(folder, generate(folder.spec, 4).arrays)
    assert captured.spec.max_batch_size == folder.spec.max_batch_size
    assert [t.describe_shape() for t in captured.spec.inputs] == ["[-1,length=2..64]"] * 2
    vocabulary = json.loads((zoo_folder(name) / "config.json").read_text())["vocab_size"]
    assert (
        str(captured.spec.inputs[0].range) == f"0..{vocabulary - 1}" and captured.spec.inputs[1].range is None
    )
    assert not unproven_sites(runnable(captured.program), captured.spec)
    shipped = load_file(folder.folder / "model.safetensors").values()
    weights = list(captured.program.state_dict.values())
    assert all(any(w.shape == s.shape and torch.equal(w, s) for w in weights) for s in shipped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("bert", ["0..999", "None", "0..1"]),
        ("gpt", ["0..255"]),
        ("llama", ["0..255"]),
        ("recommender", ["0..499", "0..1999"]),
        ("switch", ["None"]),
    ],
)
def test_the_range_of_ids_is_that_of_their_tables(name: str, ranges: list[str]) -> None:
    spec, inputs = read_folder(zoo_folder(name)).spec, asked(name, 4)
    free = {1: spec.inputs[0].shape[1]} if not all(dim.fixed for dim in spec.inputs[0].shape[1:]) else None
    net = original(built(name), inputs, free)
    module = runnable(net.program)
    exact = with_ranges(net.spec, module)
    assert [str(tensor.range) for tensor in exact.inputs] == ranges
    assert not unproven_sites(module, exact)
    for index, tensor in enumerate(exact.inputs):
        for end, step in ((tensor.range.low[0], -1), (tensor.range.high[0], 1)) if tensor.range else ():
            odd = [value.clone() for value in inputs.values()]
            odd[index].view(-1)[-1] = end
            net.run(*odd)
            odd[index].view(-1)[-1] += step
            with pytest.raises(IndexError):
                net.run(*odd)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_transformers_folder_is_made_again_by_its_script(name: str, tmp_path: Path) -> None:
    importlib.import_module(f"halfeven.models.zoo.{name}.make").main(tmp_path)
    made, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path, zoo_folder(name)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert made.keys() == shipped.keys()
    assert all(torch.equal(made[key], shipped[key]) for key in made)


@pytest.mark.slow
def test_the_wheel_stays_small(built_wheel: Path) -> None:
    assert built_wheel.stat().st_size < 2_200_000
