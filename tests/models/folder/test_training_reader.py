"""[training] of model.toml with several optimizers: what is read, and what is refused with its remedy."""

import re
from pathlib import Path

import pytest
from halfeven.models.errors import BadFolder
from halfeven.models.folder.package import ModelFolder, read_folder

from tests.model_folders import write_folder

GAN = "def critic(): ...\ndef paint(nets, inputs, targets): ...\n"
DECLARED = """
[training.nets.critic]
build = "gan.py:critic"
[training.nets.features]
build = "gan.py:critic"
weights = "gan.py"
[training.optimizers.painter]
nets = ["model"]
learning_rate = 2e-4
[training.optimizers.judge]
nets = ["critic"]
learning_rate = 1e-4
betas = [0.5, 0.999]
clip_norm = 0.5
[[training.steps]]
optimizer = "judge"
loss = "gan.py:judge"
scaler = "own"
[[training.steps]]
optimizer = "painter"
loss = "gan.py:paint"
"""


def read(tmp_path: Path, old: str = "", new: str = "", source: str = "model.py:build") -> ModelFolder:
    assert old in DECLARED
    text = DECLARED.replace(old, new, 1)
    files = {"gan.py": GAN, "program.pt2": ""}
    return read_folder(write_folder(tmp_path / "net", source=source, files=files, extra_toml=text))


def test_nets_optimizers_and_steps_are_read_as_they_are_declared(tmp_path: Path) -> None:
    folder = read(tmp_path)
    assert folder.declared_steps == {
        "nets": {
            "critic": {"build": "gan.py:critic"},
            "features": {"build": "gan.py:critic", "weights": "gan.py"},
        },
        "optimizers": {
            "painter": {"nets": ["model"], "learning_rate": 2e-4},
            "judge": {"nets": ["critic"], "learning_rate": 1e-4, "betas": [0.5, 0.999], "clip_norm": 0.5},
        },
        "steps": [
            {"optimizer": "judge", "loss": "gan.py:judge", "scaler": "own"},
            {"optimizer": "painter", "loss": "gan.py:paint"},
        ],
    }
    assert folder.net_weights == (folder.folder / "gan.py",)
    assert read_folder(write_folder(tmp_path / "plain")).declared_steps is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"judge"\nloss',
            '"judgee"\nloss',
            "optimizer = 'judgee': expected one of painter, judge; .* 'judge'",
        ),
        ('["critic"]', '["critc"]', "nets = 'critc': expected one of model, critic, features; .* 'critic'"),
        ('["critic"]', '["critic", "model"]', "'painter' and 'judge' both have .* net 'model'.* take it out"),
        ('["model"]', '["features"]', "none has the net 'model'.* add it"),
        ("[training.nets.critic]", "[training.nets.model]", "'model' is the model that is served"),
        ('"judge"\nloss', '"painter"\nloss', "'painter' is in 2 steps, expected one. Add losses up"),
        ("learning_rate = 2e-4", "", r"training.optimizers.painter.learning_rate' is missing"),
        (
            "learning_rate = 2e-4",
            "learning_rat = 1",
            "'learning_rat' is unknown; the nearest known key is 'learning_rate'",
        ),
        (
            "learning_rate = 2e-4",
            "learning_rate = 11",
            "learning_rate = 11.0: expected a number from 1e-10 to 10",
        ),
        ("betas = [0.5, 0.999]", "betas = [0.5]", "expected two numbers from 0 to below 1"),
        ('loss = "gan.py:judge"', 'loss = "mse"', "loss = 'mse': expected a function of this folder"),
        ('loss = "gan.py:judge"', 'loss = "no.py:judge"', "'no.py': there is no such file"),
        ('weights = "gan.py"', 'weights = "../w.safetensors"', "expected a file inside this folder"),
        (
            "[training.nets.critic]",
            '[training]\noptimizer = "gan.py:make"\n[training.nets.critic]',
            r"\[training.optimizers\] declares several, .* take optimizer out",
        ),
        (
            DECLARED[DECLARED.index("[[") :],
            "",
            "'steps' is not: expected at least one optimizer and one step",
        ),
    ],
)
def test_a_declaration_that_cannot_be_trained_is_refused_with_what_to_do(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(BadFolder, match=said) as caught:
        read(tmp_path, old, new)
    assert caught.value.code == "bad_model_folder" and str(tmp_path / "net/model.toml") in str(caught.value)


def test_an_optimizer_of_torch_is_declared_with_its_own_arguments(tmp_path: Path) -> None:
    new = 'optimizer = "sgd"\nmomentum = 0.9\nnesterov = true\nlearning_rate = 1e-4\nclip_norm'
    found = read(tmp_path, "learning_rate = 1e-4\nbetas = [0.5, 0.999]\nclip_norm", new).declared_steps
    assert found is not None and found["optimizers"]["judge"] == {
        "nets": ["critic"], "learning_rate": 1e-4, "clip_norm": 0.5, "optimizer": "SGD", "momentum": 0.9,
        "nesterov": True, "weight_decay": 0.0,
    }  # fmt: skip
    with pytest.raises(
        BadFolder, match=r"training.optimizers.judge\]: SGD has no argument 'betas'; the nearest"
    ):
        read(tmp_path, "betas", 'optimizer = "SGD"\nbetas')


def test_modules_that_stay_in_fp32_are_named_by_patterns_where_there_are_modules(tmp_path: Path) -> None:
    def of(source: str) -> ModelFolder:
        extra = '[training]\nfp32_modules = ["head", "blocks.*"]\n'
        return read_folder(
            write_folder(tmp_path / "net", source=source, files={"program.pt2": ""}, extra_toml=extra)
        )

    assert of("model.py:build").fp32_modules == ("head", "blocks.*")
    with pytest.raises(BadFolder, match="has no modules that could be named"):
        of("program.pt2")


def test_a_captured_program_cannot_have_several_optimizers(tmp_path: Path) -> None:
    said = "source = 'program.pt2' has none: a captured program.* Take nets, optimizers and steps out"
    with pytest.raises(BadFolder, match=re.compile(said, re.DOTALL)):
        read(tmp_path, source="program.pt2")
